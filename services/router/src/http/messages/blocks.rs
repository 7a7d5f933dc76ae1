//! Content blocks of an answer, as Anthropic's API has them: thinking, text, and calls of tools.

use ring::digest;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::request::answer_reader::AnswerPiece;

/// Bytes of the hash of thinking in its signature.
const SIGNATURE_BYTES: usize = 16;

#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::http) enum ContentBlock {
    Text {
        text: String,
    },
    Thinking {
        /// Empty if the request has `thinking.display` `omitted`.
        thinking: String,
        /// A hash of the thinking.
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// Empty if the answer was cut within the call.
        input: Map<String, Value>,
    },
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type")]
pub(in crate::http) enum BlockDelta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    /// The whole input; its beginning if the answer was cut within the call.
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// A change of an answer's content.
#[derive(Debug, PartialEq, Serialize, JsonSchema)]
#[serde(tag = "type")]
pub(in crate::http) enum BlockEvent {
    #[serde(rename = "content_block_start")]
    Start { index: u32, content_block: ContentBlock },
    #[serde(rename = "content_block_delta")]
    Delta { index: u32, delta: BlockDelta },
    #[serde(rename = "content_block_stop")]
    Stop { index: u32 },
}

impl BlockEvent {
    /// Applies the change to the blocks of an answer.
    pub(super) fn apply(self, blocks: &mut Vec<ContentBlock>) {
        let delta = match self {
            Self::Start { content_block, .. } => return blocks.push(content_block),
            Self::Delta { delta, .. } => delta,
            Self::Stop { .. } => return,
        };
        match (delta, blocks.last_mut()) {
            (BlockDelta::Text { text: more }, Some(ContentBlock::Text { text })) => {
                text.push_str(&more);
            }
            (
                BlockDelta::Thinking { thinking: more },
                Some(ContentBlock::Thinking { thinking, .. }),
            ) => thinking.push_str(&more),
            (
                BlockDelta::Signature { signature: whole },
                Some(ContentBlock::Thinking { signature, .. }),
            ) => *signature = whole,
            (BlockDelta::InputJson { partial_json }, Some(ContentBlock::ToolUse { input, .. })) => {
                *input = serde_json::from_str(&partial_json).unwrap_or_default()
            }
            _ => {}
        }
    }
}

/// Converter of the pieces of an answer into content blocks.
pub(super) struct BlockWriter {
    open: Option<OpenBlock>,
    /// Number of begun blocks.
    count: u32,
    /// White space that becomes text only with the first other character: models write line ends
    /// around calls, and Anthropic's API refuses a block of white space in the next request.
    blank: String,
    shows_thinking: bool,
}

enum OpenBlock {
    Text,
    /// The hash of the thinking so far.
    Thinking(digest::Context),
}

impl BlockWriter {
    pub(super) fn new(shows_thinking: bool) -> Self {
        Self { open: None, count: 0, blank: String::new(), shows_thinking }
    }

    /// Converts the next piece of the answer.
    pub(super) fn push(&mut self, piece: AnswerPiece, emit: &mut impl FnMut(BlockEvent)) {
        match piece {
            AnswerPiece::Reasoning(thinking) => self.push_thinking(thinking, emit),
            AnswerPiece::Content(text) => self.push_text(text, emit),
            AnswerPiece::Call { id, call, .. } => {
                self.close(emit);
                let content_block =
                    ContentBlock::ToolUse { id, name: call.name, input: Map::new() };
                let index = self.begin(content_block, emit);
                let delta = BlockDelta::InputJson { partial_json: call.arguments };
                emit(BlockEvent::Delta { index, delta });
                emit(BlockEvent::Stop { index });
            }
        }
    }

    /// Ends the last block. An answer of white space alone has one block of text.
    pub(super) fn finish(&mut self, emit: &mut impl FnMut(BlockEvent)) {
        if self.count == 0 && !self.blank.is_empty() {
            self.write_text(emit);
        }
        self.close(emit);
    }

    fn push_text(&mut self, text: String, emit: &mut impl FnMut(BlockEvent)) {
        if text.is_empty() {
            return;
        }
        self.blank.push_str(&text);
        if matches!(self.open, Some(OpenBlock::Text)) || !text.trim().is_empty() {
            self.write_text(emit);
        }
    }

    fn write_text(&mut self, emit: &mut impl FnMut(BlockEvent)) {
        let text = std::mem::take(&mut self.blank);
        if !matches!(self.open, Some(OpenBlock::Text)) {
            self.close(emit);
            self.begin(ContentBlock::Text { text: String::new() }, emit);
            self.open = Some(OpenBlock::Text);
        }
        let index = self.count - 1;
        emit(BlockEvent::Delta { index, delta: BlockDelta::Text { text } });
    }

    fn push_thinking(&mut self, thinking: String, emit: &mut impl FnMut(BlockEvent)) {
        let mut hash = match self.open.take() {
            Some(OpenBlock::Thinking(hash)) => hash,
            other => {
                self.open = other;
                self.close(emit);
                let (thinking, signature) = (String::new(), String::new());
                self.begin(ContentBlock::Thinking { thinking, signature }, emit);
                digest::Context::new(&digest::SHA256)
            }
        };
        hash.update(thinking.as_bytes());
        self.open = Some(OpenBlock::Thinking(hash));
        if self.shows_thinking {
            let index = self.count - 1;
            let delta = BlockDelta::Thinking { thinking };
            emit(BlockEvent::Delta { index, delta });
        }
    }

    /// Begins a block and returns its index.
    fn begin(&mut self, content_block: ContentBlock, emit: &mut impl FnMut(BlockEvent)) -> u32 {
        let index = self.count;
        self.count += 1;
        self.blank.clear();
        emit(BlockEvent::Start { index, content_block });
        index
    }

    fn close(&mut self, emit: &mut impl FnMut(BlockEvent)) {
        let Some(open) = self.open.take() else { return };
        let index = self.count - 1;
        if let OpenBlock::Thinking(hash) = open {
            let hash = hash.finish();
            let hash = &hash.as_ref()[..SIGNATURE_BYTES];
            let signature = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            let delta = BlockDelta::Signature { signature };
            emit(BlockEvent::Delta { index, delta });
        }
        emit(BlockEvent::Stop { index });
    }
}

#[cfg(test)]
mod tests {
    use text::ToolCall;

    use super::*;

    fn blocks(pieces: Vec<AnswerPiece>, shows_thinking: bool) -> Vec<ContentBlock> {
        let mut writer = BlockWriter::new(shows_thinking);
        let (mut blocks, mut open) = (Vec::new(), None);
        let mut emit = |event: BlockEvent| {
            match &event {
                BlockEvent::Start { index, .. } => {
                    assert_eq!((open, *index as usize), (None, blocks.len()));
                    open = Some(*index);
                }
                BlockEvent::Delta { index, .. } => assert_eq!(open, Some(*index)),
                BlockEvent::Stop { index } => assert_eq!(open.take(), Some(*index)),
            }
            event.apply(&mut blocks);
        };
        for piece in pieces {
            writer.push(piece, &mut emit);
        }
        writer.finish(&mut emit);
        assert_eq!(open, None, "every block ends");
        blocks
    }

    fn content(text: &str) -> AnswerPiece {
        AnswerPiece::Content(text.to_owned())
    }

    fn reasoning(text: &str) -> AnswerPiece {
        AnswerPiece::Reasoning(text.to_owned())
    }

    fn call(arguments: &str) -> AnswerPiece {
        let call = ToolCall { name: "f".to_owned(), arguments: arguments.to_owned() };
        AnswerPiece::Call { index: 0, id: "call_1".to_owned(), call }
    }

    fn text(text: &str) -> ContentBlock {
        ContentBlock::Text { text: text.to_owned() }
    }

    #[test]
    fn pieces_become_blocks_and_white_space_between_them_is_dropped() {
        let tool_use = |input: Value| {
            let (id, name) = ("call_1".to_owned(), "f".to_owned());
            ContentBlock::ToolUse { id, name, input: input.as_object().unwrap().clone() }
        };
        let pieces = vec![
            content("\n"),
            reasoning("Look"),
            reasoning(" it up."),
            content("\n\n"),
            content(" I look."),
            content("\n"),
            call(r#"{"a": 1}"#),
            content("\n"),
            call(r#"{"a": "#),
        ];
        let thinking = |thinking: &str| ContentBlock::Thinking {
            thinking: thinking.to_owned(),
            signature: "0d9bfcd1f8f2f0d8e2d1a1ce8fd6a9b4".to_owned(),
        };
        let mut found = blocks(pieces, true);
        let ContentBlock::Thinking { signature, .. } = &mut found[0] else { panic!("{found:?}") };
        assert_eq!(signature.len(), 2 * SIGNATURE_BYTES);
        *signature = "0d9bfcd1f8f2f0d8e2d1a1ce8fd6a9b4".to_owned();
        let expected = vec![
            thinking("Look it up."),
            text("\n\n I look.\n"),
            tool_use(serde_json::json!({"a": 1})),
            tool_use(serde_json::json!({})),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn signature_depends_on_the_thinking_alone_and_hidden_thinking_has_one() {
        let shown = blocks(vec![reasoning("a"), reasoning("b"), content("c")], true);
        let hidden = blocks(vec![reasoning("ab"), content("c")], false);
        let other = blocks(vec![reasoning("x"), content("c")], false);
        let signature = |blocks: &[ContentBlock]| match &blocks[0] {
            ContentBlock::Thinking { thinking, signature } => (thinking.clone(), signature.clone()),
            block => panic!("{block:?}"),
        };
        assert_eq!((signature(&shown).0.as_str(), signature(&hidden).0.as_str()), ("ab", ""));
        assert_eq!(signature(&shown).1, signature(&hidden).1);
        assert_ne!(signature(&other).1, signature(&hidden).1);
    }

    #[test]
    fn answer_of_white_space_has_one_block_and_empty_one_none() {
        assert_eq!(blocks(vec![content(" "), content("\n")], true), [text(" \n")]);
        assert_eq!(blocks(vec![content("")], true), []);
    }
}
