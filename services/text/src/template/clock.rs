//! Dates for templates: the part of C's `strftime` that they use, in UTC.

const WEEKDAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const FORMAT_BYTES_MAX: usize = 256;

/// Formats `seconds` since 1970; an error names the unknown directive.
pub(super) fn format_utc(seconds: u64, format: &str) -> Result<String, String> {
    if format.len() > FORMAT_BYTES_MAX {
        return Err(format!("strftime_now takes at most {FORMAT_BYTES_MAX} bytes"));
    }
    let date = Date::of(seconds);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            out.push(char);
            continue;
        }
        let mut directive = chars.next().ok_or("strftime_now: the format ends with %")?;
        // GNU's mark for a number without its leading zero.
        let unpadded = directive == '-';
        if unpadded {
            directive = chars.next().ok_or("strftime_now: the format ends with %-")?;
        }
        let text = date
            .directive(directive)
            .ok_or_else(|| format!("strftime_now does not know %{directive}"))?;
        let trimmed = text.trim_start_matches('0');
        out.push_str(match (unpadded, trimmed) {
            (false, _) => &text,
            (true, "") => "0",
            (true, trimmed) => trimmed,
        });
    }
    Ok(out)
}

/// Date and time of the Gregorian calendar.
struct Date {
    year: u64,
    /// From 1.
    month: u64,
    /// From 1.
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// 0 is Thursday, the weekday of 1970-01-01.
    weekday: u64,
    hour: u64,
    minute: u64,
    second: u64,
}

impl Date {
    fn of(seconds: u64) -> Self {
        let days = seconds / 86_400;
        // Years that begin in March end with the leap day; 719,468 days precede 1970-01-01.
        let shifted = days + 719_468;
        let era = shifted / 146_097;
        let day_of_era = shifted % 146_097;
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_shifted_year =
            day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_shifted_year + 2) / 153;
        let day = day_of_shifted_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = year_of_era + era * 400 + u64::from(month <= 2);
        let leap =
            year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let day_of_year = if month <= 2 {
            day_of_shifted_year - 306 + 1
        } else {
            day_of_shifted_year + 59 + u64::from(leap) + 1
        };
        Self {
            year,
            month,
            day,
            day_of_year,
            weekday: days % 7,
            hour: seconds / 3_600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn directive(&self, directive: char) -> Option<String> {
        let weekday = WEEKDAYS[self.weekday as usize];
        let month = MONTHS[self.month as usize - 1];
        let hour_of_12 = (self.hour + 11) % 12 + 1;
        Some(match directive {
            'Y' => self.year.to_string(),
            'y' => format!("{:02}", self.year % 100),
            'm' => format!("{:02}", self.month),
            'B' => month.to_owned(),
            'b' | 'h' => month[..3].to_owned(),
            'd' => format!("{:02}", self.day),
            'e' => format!("{:2}", self.day),
            'j' => format!("{:03}", self.day_of_year),
            'A' => weekday.to_owned(),
            'a' => weekday[..3].to_owned(),
            'H' => format!("{:02}", self.hour),
            'I' => format!("{hour_of_12:02}"),
            'p' => (if self.hour < 12 { "AM" } else { "PM" }).to_owned(),
            'M' => format!("{:02}", self.minute),
            'S' => format!("{:02}", self.second),
            'F' => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
            'T' => format!("{:02}:{:02}:{:02}", self.hour, self.minute, self.second),
            'Z' => "UTC".to_owned(),
            'z' => "+0000".to_owned(),
            '%' => "%".to_owned(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected texts are the output of GNU date: date -u -d @SECONDS +FORMAT.

    #[test]
    fn dates_are_those_of_the_calendar() {
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
    fn templates_formats_are_known() {
        let noon = 1_722_000_000;
        assert_eq!(format_utc(noon, "%d %b %Y").unwrap(), "26 Jul 2024");
        assert_eq!(format_utc(noon, "%A, %B %-d, %Y").unwrap(), "Friday, July 26, 2024");
        assert_eq!(format_utc(noon, "%I:%M:%S %p %%").unwrap(), "01:20:00 PM %");
        assert_eq!(format_utc(0, "%-H%e").unwrap(), "0 1");
    }

    #[test]
    fn unknown_directives_are_refused() {
        assert_eq!(format_utc(0, "%Q").unwrap_err(), "strftime_now does not know %Q");
        assert!(format_utc(0, "%").is_err());
        assert!(format_utc(0, "%-").is_err());
        assert!(format_utc(0, &"x".repeat(257)).is_err());
    }
}
