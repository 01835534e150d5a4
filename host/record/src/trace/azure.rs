//! The Azure LLM inference traces, as CSV. Must never know: what a request is used for.

use std::{io::BufRead, path::Path, time::Duration};

use csv::{ReaderBuilder, StringRecord, Trim};

use super::{TraceError, TraceRequest, shown, tokens};

/// The columns, in the order in which they are published; a file may have them in another.
pub(super) const COLUMNS: [&str; 3] = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"];

pub(super) fn read(
    path: &Path,
    file: impl BufRead,
    most: usize,
) -> Result<Vec<TraceRequest>, TraceError> {
    let wrong = |line: u64, what: String| TraceError::Line {
        path: path.to_owned(),
        line,
        what,
    };
    let broken = |error: &csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        wrong(line, format!("{error}: fix or remove the line"))
    };
    let mut reader = ReaderBuilder::new()
        .flexible(true)
        .trim(Trim::All)
        .from_reader(file);
    let headers = reader.headers().map_err(|error| broken(&error))?;
    let mut places = [0; 3];
    for (place, column) in places.iter_mut().zip(COLUMNS) {
        *place = headers
            .iter()
            .position(|header| header.trim_start_matches('\u{feff}') == column)
            .ok_or_else(|| {
                wrong(
                    1,
                    format!(
                        "the column {column} is missing; the header is {}",
                        COLUMNS.join(",")
                    ),
                )
            })?;
    }
    let mut requests = Vec::new();
    let mut row = StringRecord::new();
    while requests.len() < most
        && reader
            .read_record(&mut row)
            .map_err(|error| broken(&error))?
    {
        let line = row.position().map_or(0, csv::Position::line);
        let request = request(&row, places).map_err(|what| wrong(line, what))?;
        requests.push(request);
    }
    Ok(requests)
}

fn request(row: &StringRecord, places: [usize; 3]) -> Result<TraceRequest, String> {
    let field = |index: usize| {
        row.get(places[index]).ok_or_else(|| {
            format!(
                "it has {} fields and no {}: fix or remove the line",
                row.len(),
                COLUMNS[index]
            )
        })
    };
    let number = |index: usize| {
        let text = field(index)?;
        let count: u64 = text.parse().map_err(|_| {
            format!(
                "{} is `{}`, not a whole number: fix or remove the line",
                COLUMNS[index],
                shown(text, 40)
            )
        })?;
        tokens(COLUMNS[index], count)
    };
    let time = field(0)?;
    Ok(TraceRequest {
        arrival: timestamp(time).ok_or_else(|| {
            format!(
                "{} is `{}`, not a time as `2023-11-16 18:17:03.9799600`: fix or remove the line",
                COLUMNS[0],
                shown(time, 40)
            )
        })?,
        input_length: number(1)?,
        output_length: number(2)?,
        hash_ids: Vec::new(),
    })
}

/// A time in UTC, since 1970: `YYYY-MM-DD HH:MM:SS`, a fraction, and `Z` or `+00:00`, which both may be left out.
fn timestamp(text: &str) -> Option<Duration> {
    let text = text.strip_suffix("+00:00").unwrap_or(text);
    let text = text.strip_suffix('Z').unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let number = |text: &str, most: u64| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number: u64 = text.parse().ok().filter(|_| digits)?;
        (number <= most).then_some(number)
    };
    let mut date = date.split('-');
    let (year, month, day) = (
        number(date.next()?, 9999)?,
        number(date.next()?, 12)?,
        number(date.next()?, 31)?,
    );
    let mut time = time.split(':');
    let (hour, minute, second) = (
        number(time.next()?, 23)?,
        number(time.next()?, 59)?,
        number(time.next()?, 60)?,
    );
    if year < 1970 || month < 1 || day < 1 || date.next().is_some() || time.next().is_some() {
        return None;
    }
    if fraction.len() > 9 {
        return None;
    }
    let nanos = number(fraction, 999_999_999)? * 10_u64.pow(9 - fraction.len() as u32);
    let seconds = ((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second;
    Some(Duration::new(seconds, nanos as u32))
}

/// Days from 1970 to a date of the Gregorian calendar: years begin in March, so that the day that some have more is the last.
fn days(year: u64, month: u64, day: u64) -> u64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let leap_days = year / 4 - year / 100 + year / 400;
    // Days from March of the year 0 to the beginning of 1970.
    const EPOCH: u64 = 719_468;
    year * 365 + leap_days + (153 * month + 2) / 5 + day - 1 - EPOCH
}

#[cfg(test)]
mod tests {
    use super::timestamp;

    #[test]
    fn times_are_seconds_since_1970() {
        for (text, seconds, nanos) in [
            ("1970-01-01 00:00:00", 0, 0),
            ("2000-02-29 12:00:00.5", 951_825_600, 500_000_000),
            ("2023-11-16 18:17:03.9799600", 1_700_158_623, 979_960_000),
            ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200, 9_930_000),
            ("2024-12-31T23:59:59Z", 1_735_689_599, 0),
        ] {
            let time = timestamp(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(
                (time.as_secs(), time.subsec_nanos()),
                (seconds, nanos),
                "{text}"
            );
        }
        for text in [
            "",
            "now",
            "2023-11-16",
            "2023-13-16 18:17:03",
            "2023-00-16 18:17:03",
            "2023-11-16 25:17:03",
            "2023-11-16 18:17",
            "2023-11-16 18:17:03.-1",
            "2023-11-16 18:17:03.1234567890",
            "1969-11-16 18:17:03",
            "+2023-11-16 18:17:03",
        ] {
            assert_eq!(timestamp(text), None, "{text}");
        }
    }
}
