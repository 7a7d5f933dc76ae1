//! Dates for templates: Python's `strftime`, in UTC.

use time::{OffsetDateTime, format_description::parse_strftime_borrowed};

const FORMAT_BYTES_MAX: usize = 256;

/// Formats `seconds` since the Unix epoch.
pub(super) fn format_utc(seconds: u64, format: &str) -> Result<String, String> {
    if format.len() > FORMAT_BYTES_MAX {
        return Err(format!("strftime_now takes at most {FORMAT_BYTES_MAX} bytes"));
    }
    let date = i64::try_from(seconds).ok().map(OffsetDateTime::from_unix_timestamp);
    let date =
        date.and_then(Result::ok).ok_or("strftime_now: the year has more than four digits")?;
    let mut out = String::new();
    let mut rest = format;
    while let Some((text, directive)) = rest.split_once('%') {
        out.push_str(text);
        // GNU's `%-d` omits the leading zero.
        let name_at = usize::from(directive.starts_with('-'));
        let name = directive[name_at..].chars().next();
        let name = name.ok_or("strftime_now: the format ends within a directive")?;
        let (directive, after) = directive.split_at(name_at + name.len_utf8());
        match name {
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            _ => {
                let unknown = || format!("strftime_now does not know %{name}");
                let directive = format!("%{directive}");
                let parsed = parse_strftime_borrowed(&directive).map_err(|_| unknown())?;
                out.push_str(&date.format(&parsed).map_err(|_| unknown())?);
            }
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected texts are the output of GNU date: date -u -d @SECONDS +FORMAT.

    #[test]
    fn strftime_dates_match_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 001 Thu"),
            (951_782_400, "2000-02-29 060 Tue"),
            (951_868_800, "2000-03-01 061 Wed"),
            (1_735_603_200, "2024-12-31 366 Tue"),
            (1_740_787_199, "2025-02-28 059 Fri"),
            (4_102_444_800, "2100-01-01 001 Fri"),
            (4_107_542_400, "2100-03-01 060 Mon"),
        ] {
            assert_eq!(format_utc(seconds, "%Y-%m-%d %j %a").unwrap(), expected);
        }
    }

    #[test]
    fn strftime_directives_of_templates_are_supported() {
        let noon = 1_722_000_000;
        assert_eq!(format_utc(noon, "%d %b %Y").unwrap(), "26 Jul 2024");
        assert_eq!(format_utc(noon, "%A, %B %-d, %Y").unwrap(), "Friday, July 26, 2024");
        assert_eq!(format_utc(noon, "%I:%M:%S %p %%").unwrap(), "01:20:00 PM %");
        assert_eq!(format_utc(0, "%-H%e").unwrap(), "0 1");
    }

    #[test]
    fn unknown_strftime_directives_are_rejected() {
        assert_eq!(format_utc(0, "%Q").unwrap_err(), "strftime_now does not know %Q");
        assert!(format_utc(0, "%").is_err());
        assert!(format_utc(0, "%-").is_err());
        assert!(format_utc(0, &"x".repeat(257)).is_err());
    }
}
