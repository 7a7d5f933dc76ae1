//! Parser of server-sent events: takes bytes, returns the `data` of complete events.

use anyhow::{Context, Result, ensure};

/// Maximum length of a line in bytes.
const LINE_BYTES_MAX: usize = 4 << 20;

#[derive(Default)]
pub(crate) struct SseReader {
    line: Vec<u8>,
    data: String,
}

impl SseReader {
    /// Parses the next bytes and appends the data of each completed event to `events`.
    pub(crate) fn push(&mut self, bytes: &[u8], events: &mut Vec<String>) -> Result<()> {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&rest[..end]);
            rest = &rest[end + 1..];
            self.take_line(events)?;
        }
        let is_short = self.line.len() + rest.len() <= LINE_BYTES_MAX;
        ensure!(is_short, "invalid event: a line is longer than {LINE_BYTES_MAX} bytes");
        self.line.extend_from_slice(rest);
        Ok(())
    }

    fn take_line(&mut self, events: &mut Vec<String>) -> Result<()> {
        let line = std::mem::take(&mut self.line);
        let line = std::str::from_utf8(&line).context("invalid event: a line is not UTF-8")?;
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.is_empty() {
            if !self.data.is_empty() {
                events.push(std::mem::take(&mut self.data));
            }
        } else if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        }
        // Ignore comments (keep-alives) and other fields.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(chunks: &[&[u8]]) -> Vec<String> {
        let mut reader = SseReader::default();
        let mut events = Vec::new();
        for chunk in chunks {
            reader.push(chunk, &mut events).unwrap();
        }
        events
    }

    #[test]
    fn event_may_be_split_at_any_byte() {
        let stream =
            b"data: {\"a\":1}\n\n: keep-alive\n\ndata: two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n";
        let whole = read(&[stream]);
        assert_eq!(whole, ["{\"a\":1}", "two\nlines", "[DONE]"]);
        for cut in 0..stream.len() {
            assert_eq!(read(&[&stream[..cut], &stream[cut..]]), whole, "cut at {cut}");
        }
    }

    #[test]
    fn incomplete_event_is_not_reported() {
        assert!(read(&[b"data: half\n"]).is_empty());
    }

    #[test]
    fn line_beyond_the_limit_is_rejected() {
        let mut reader = SseReader::default();
        let chunk = vec![b'x'; LINE_BYTES_MAX];
        reader.push(&chunk, &mut Vec::new()).unwrap();
        let error = reader.push(b"x", &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("longer than 4194304 bytes"), "{error}");
    }
}
