//! Texts and tables for a terminal. The texts come from the network and must not control the
//! terminal.

use unicode_width::UnicodeWidthChar;

/// Returns the text with U+FFFD in place of each character that takes no column: control characters
/// such as the start of an escape sequence, line ends, and marks that reverse text.
pub(crate) fn printable(text: &str) -> String {
    let replaced = |c: char| match c.width() {
        // Their width is one column, but they end lines and paragraphs.
        _ if matches!(c, '\u{2028}' | '\u{2029}') => char::REPLACEMENT_CHARACTER,
        Some(1..) => c,
        Some(0) | None => char::REPLACEMENT_CHARACTER,
    };
    text.chars().map(replaced).collect()
}

/// Returns the longest prefix of a printable text that fits into the columns.
pub(crate) fn cut(text: &str, columns: usize) -> &str {
    let mut width = 0;
    let beyond = text.char_indices().find(|(_, c)| {
        width += c.width().unwrap_or(0);
        width > columns
    });
    &text[..beyond.map_or(text.len(), |(index, _)| index)]
}

/// Returns the number of columns of a printable text.
fn width(text: &str) -> usize {
    text.chars().filter_map(UnicodeWidthChar::width).sum()
}

/// Returns the head and the rows as printable lines of aligned columns.
pub(crate) fn aligned<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> Vec<String> {
    let head = head.map(str::to_owned);
    let rows = [&head].into_iter().chain(rows);
    let rows: Vec<[String; N]> = rows.map(|row| row.each_ref().map(|it| printable(it))).collect();
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|row| width(&row[column])).max().unwrap_or(0));
    let line = |row: &[String; N]| {
        let mut line = String::new();
        for (cell, column) in row.iter().zip(widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', column - width(cell) + 2));
        }
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_from_the_network_cannot_control_the_terminal() {
        let hostile = "\x1b]0;title\x07a\u{9b}31mb\r\nc\u{202e}d\u{2028}e\u{200b}f\u{7f}g\u{300}";
        let shown = printable(hostile);
        assert_eq!(shown, "�]0;title�a�31mb��c�d�e�f�g�");
        assert!(!shown.chars().any(char::is_control), "{shown:?}");
        assert_eq!(printable("Köln 模型 🦀"), "Köln 模型 🦀");
        let lines = aligned(["\x1bA", "B"], &[["a\nb".into(), "\x1b[2J".into()]]);
        assert_eq!(lines, ["�A   B", "a�b  �[2J"]);
    }

    #[test]
    fn columns_are_aligned_by_the_width_of_their_texts() {
        let rows = [["模型".into(), "1".into()], ["a".into(), String::new()]];
        assert_eq!(aligned(["M", "N"], &rows), ["M     N", "模型  1", "a"]);
        assert_eq!(cut("模型a", 5), "模型a");
        assert_eq!(cut("模型a", 4), "模型");
        assert_eq!(cut("模型a", 3), "模");
        assert_eq!(cut("", 0), "");
    }
}
