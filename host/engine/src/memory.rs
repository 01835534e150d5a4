//! How much memory there is and how much of it this process has: what sizes the KV cache. Linux only.

/// Bytes that this process may use: the machine's memory, or its control group's limit where that is lower.
pub fn total_bytes() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or(0, |kib| kib * 1024);
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max")
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok());
    limit.map_or(machine, |limit| limit.min(machine))
}

/// Bytes of this process that are resident now.
pub fn resident_bytes() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok()
        })
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_is_smaller_than_its_machine() {
        let (used, total) = (super::resident_bytes(), super::total_bytes());
        assert!(used > 0 && used < total, "{used} of {total}");
    }
}
