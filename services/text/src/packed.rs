//! Many short strings in one allocation.
//!
//! A vocabulary as `Vec<String>` costs about 60 bytes per token beyond its text, and a router keeps
//! its vocabulary resident.

/// Strings by index, at most `u32::MAX` bytes in total.
#[derive(Clone, Debug, Default)]
pub(crate) struct PackedStrings {
    text: String,
    /// End of each string in `text`, in bytes.
    ends: Vec<u32>,
}

impl PackedStrings {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Appends a string. Returns false, and changes nothing, when the strings would exceed the
    /// maximum size.
    #[must_use]
    pub(crate) fn push(&mut self, string: &str) -> bool {
        let Ok(end) = u32::try_from(self.text.len() + string.len()) else { return false };
        self.text.push_str(string);
        self.ends.push(end);
        true
    }

    /// Returns the string at `index`, which must be less than [`len`](Self::len).
    pub(crate) fn get(&self, index: usize) -> &str {
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.text[start..self.ends[index] as usize]
    }

    pub(crate) fn shrink(&mut self) {
        self.text.shrink_to_fit();
        self.ends.shrink_to_fit();
    }
}
