//! Many short strings in one allocation.
//!
//! A vocabulary as `Vec<String>` costs some 60 bytes a token beyond its text; a router keeps one
//! resident for as long as it lives.

/// Strings by index, `u32::MAX` bytes in all at most.
#[derive(Clone, Debug, Default)]
pub(crate) struct PackedStrings {
    text: String,
    /// Where each string ends in `text`.
    ends: Vec<u32>,
}

impl PackedStrings {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// False, and nothing happens, when the strings would no longer fit.
    #[must_use]
    pub fn push(&mut self, string: &str) -> bool {
        let Ok(end) = u32::try_from(self.text.len() + string.len()) else { return false };
        self.text.push_str(string);
        self.ends.push(end);
        true
    }

    /// The string at `index`, which must be less than [`len`](Self::len).
    pub fn get(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.text[start..self.ends[index] as usize]
    }

    pub fn shrink(&mut self) {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}
