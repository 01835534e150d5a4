//! Plain tables for people: columns as wide as their widest cell.

/// Formats `rows` under `header`. Numbers, by their look, stand to the right.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let numeric: Vec<bool> = (0..header.len())
        .map(|column| {
            !rows.is_empty()
                && rows.iter().all(|row| {
                    row[column].is_empty()
                        || row[column].starts_with(|c: char| c.is_ascii_digit() || c == '-')
                })
        })
        .collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (column, cell) in cells.enumerate() {
            if column > 0 {
                line.push_str("  ");
            }
            let width = widths[column];
            line.push_str(&if numeric[column] {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            });
        }
        line.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut header.iter().copied());
    for row in rows {
        text.push_str(&line(&mut row.iter().map(String::as_str)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_aligned() {
        let rows = vec![
            vec!["FLASH_ATTN".to_owned(), "7".to_owned()],
            vec!["FI".to_owned(), "1024".to_owned()],
        ];
        assert_eq!(
            table(&["backend", "steps"], &rows),
            "backend     steps\nFLASH_ATTN      7\nFI           1024\n"
        );
    }
}
