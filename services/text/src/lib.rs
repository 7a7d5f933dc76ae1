//! Text on its way to and from a model: tokenizer, chat template, detokeniser, stop strings.
//!
//! * [`ModelText`] reads a model's [`Tokenizer`] and [`ChatTemplate`] out of a GGUF file or a Hugging
//!   Face folder.
//! * [`TextStream`] turns one choice's tokens into text as they come: a [`Detokenizer`] that never
//!   shows half a character and [`StopStrings`] that hold back what may begin a stop string.
//!
//! Nothing here knows kernels, sockets or clocks; the router links it, nodes do not need it. Encoding
//! and rendering are CPU work in proportion to the text: long ones belong on blocking threads.

#![forbid(unsafe_code)]

mod byte_pair;
mod decoding;
mod detokenizer;
mod error;
mod model_text;
mod packed;
mod source;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod vocabulary;

pub use detokenizer::{Detokenizer, DetokenizerOptions};
pub use error::{LoadError, VocabularyError};
pub use model_text::ModelText;
pub use stop::{STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, StopError, StopProgress, StopStrings};
pub use stream::{StopHit, TextDelta, TextStream, TextStreamOptions};
pub use template::{ChatTemplate, RENDERED_BYTES_MAX, RenderRequest, TEMPLATE_FUEL, TemplateError};
pub use tokenizer::{EncodeError, SpecialTokens, TEXT_BYTES_MAX, Tokenizer};
pub use vocabulary::VOCABULARY_SIZE_MAX;
