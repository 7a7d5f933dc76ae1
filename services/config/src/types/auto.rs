/// A setting that the service derives at start unless the operator sets a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    #[default]
    Derived,
    Set(T),
}

impl<T> Auto<T> {
    /// Returns the value that the operator set.
    pub fn set(self) -> Option<T> {
        match self {
            Self::Derived => None,
            Self::Set(value) => Some(value),
        }
    }
}
