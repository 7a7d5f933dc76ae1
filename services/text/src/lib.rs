//! Text processing of a model: tokenizer, chat template, detokenizer, stop strings, reasoning,
//! tool calls.
//!
//! * [`ModelText`] reads a model's [`Tokenizer`], [`ChatTemplate`] and [`SamplingDefaults`] from a
//!   GGUF file or a Hugging Face folder.
//! * [`TextStream`] turns one choice's tokens into text: a [`Detokenizer`] that never emits part of
//!   a character, and [`StopStrings`] that hold back a possible beginning of a stop string.
//! * [`ReasoningParser`] separates the reasoning of a model from the rest of this text, and
//!   [`ToolParser`] separates tool calls from content in the rest.
//! * [`TokenTable`] is the part that a node needs: the bytes of each token.
//!
//! This crate uses no kernels, sockets or clocks. The CPU time of encoding and rendering grows with
//! the text, so callers process long texts on blocking threads.

#![forbid(unsafe_code)]

mod byte_pair;
mod decoding;
mod detokenizer;
mod error;
mod literal;
mod merging;
mod model_text;
mod packed;
mod pipeline;
mod pooled_model;
mod reasoning;
mod sampling_defaults;
mod sentence_piece;
mod source;
mod stop;
mod stream;
mod template;
mod token_table;
mod tokenizer;
mod tools;
mod vocabulary;

pub use detokenizer::{Detokenizer, DetokenizerOptions};
pub use error::{LoadError, VocabularyError};
pub use model_text::{ModelText, ModelTextOptions};
pub use pooled_model::{Dimensions, EmbeddingModel, NotPooled, PooledModel, RerankerModel};
pub use reasoning::{ReasoningChoice, ReasoningFormat, ReasoningParser, ReasoningStart, SplitText};
pub use sampling_defaults::SamplingDefaults;
pub use stop::{
    STOP_STRING_BYTES_MAX, STOP_STRINGS_MAX, StopProgress, StopStringError, StopStrings,
};
pub use stream::{HeaderSearch, HeaderTokens, StopHit, TextDelta, TextStream, TextStreamOptions};
pub use template::{ChatTemplate, RENDERED_BYTES_MAX, RenderRequest, TEMPLATE_FUEL, TemplateError};
pub use token_table::TokenTable;
pub use tokenizer::{EncodeError, SpecialTokens, TEXT_BYTES_MAX, Tokenizer};
pub use tools::{
    CallableFunction, ParameterSyntax, ToolCall, ToolFormat, ToolParser, ToolPiece, ToolSyntax,
};
pub use vocabulary::VOCABULARY_SIZE_MAX;
