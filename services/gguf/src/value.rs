//! Metadata values.

use std::fmt;

use crate::{error::GgufError, reader::HeaderReader};

/// Declares values and arrays. Each scalar has its type's number in files, its name in errors, and
/// the conversion of its bytes.
macro_rules! values {
    ($($number:literal $Variant:ident $T:ident $name:literal $convert:expr;)+) => {
        /// One metadata value, with the type in the file.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($Variant($T),)+
            String(String),
            Array(Array),
        }

        /// An array whose elements have one type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($Variant(Vec<$T>),)+
            String(Vec<String>),
            Array(Vec<Array>),
        }

        impl Value {
            /// Reads a scalar; `None` for another type.
            pub(crate) fn read_scalar(
                reader: &mut HeaderReader<'_>,
                value_type: u32,
                what: impl Fn() -> String,
            ) -> Result<Option<Self>, GgufError> {
                Ok(Some(match value_type {
                    $($number => Self::$Variant(($convert)(reader.array(what)?)),)+
                    _ => return Ok(None),
                }))
            }

            /// Returns the type as errors name it: `u32`, `array of string[49152]`.
            pub fn type_name(&self) -> String {
                match self {
                    $(Self::$Variant(_) => $name.into(),)+
                    Self::String(_) => "string".into(),
                    Self::Array(array) => {
                        format!("array of {}[{}]", array.element_type_name(), array.len())
                    }
                }
            }
        }

        /// Formats the value briefly: long strings are cut, arrays give type and length.
        impl fmt::Display for Value {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                const SHOWN_CHARS: usize = 80;
                match self {
                    $(Self::$Variant(v) => v.fmt(f),)+
                    Self::String(v) => {
                        let shown: String = v.chars().take(SHOWN_CHARS).collect();
                        let more = if shown.len() < v.len() { "..." } else { "" };
                        write!(f, "{shown:?}{more}")
                    }
                    Self::Array(_) => f.write_str(&self.type_name()),
                }
            }
        }

        impl Array {
            /// Reads an array of scalars; `None` for other elements.
            pub(crate) fn read_scalars(
                reader: &mut HeaderReader<'_>,
                element_type: u32,
                count: u64,
                what: impl Fn() -> String,
            ) -> Result<Option<Self>, GgufError> {
                Ok(Some(match element_type {
                    $($number => Self::$Variant(reader.items(count, what, $convert)?),)+
                    _ => return Ok(None),
                }))
            }

            fn len(&self) -> usize {
                match self {
                    $(Self::$Variant(v) => v.len(),)+
                    Self::String(v) => v.len(),
                    Self::Array(v) => v.len(),
                }
            }

            fn element_type_name(&self) -> &'static str {
                match self {
                    $(Self::$Variant(_) => $name,)+
                    Self::String(_) => "string",
                    Self::Array(_) => "array",
                }
            }
        }
    };
}

values! {
    0 U8 u8 "u8" u8::from_le_bytes;
    1 I8 i8 "i8" i8::from_le_bytes;
    2 U16 u16 "u16" u16::from_le_bytes;
    3 I16 i16 "i16" i16::from_le_bytes;
    4 U32 u32 "u32" u32::from_le_bytes;
    5 I32 i32 "i32" i32::from_le_bytes;
    6 F32 f32 "f32" f32::from_le_bytes;
    7 Bool bool "bool" |[byte]: [u8; 1]| byte != 0;
    10 U64 u64 "u64" u64::from_le_bytes;
    11 I64 i64 "i64" i64::from_le_bytes;
    12 F64 f64 "f64" f64::from_le_bytes;
}

impl Value {
    /// Returns the value as an integer of any width and sign; `None` for other types.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}
