//! Reasoning, content and tool calls in the text of an answer.
//!
//! An [`AnswerReader`] first separates reasoning, then tool calls. It exists where the model has a
//! format of reasoning or the request offers tools; otherwise the text of an answer is its content.

use std::sync::Arc;

use grammar::ReasoningTags;
use proto::{
    ids::RequestId,
    v1::{FinishReason, Token},
};
use text::{
    CallableFunction, HeaderSearch, HeaderTokens, ReasoningFormat, ReasoningParser, ReasoningStart,
    SplitText, Tokenizer, ToolCall, ToolFormat, ToolParser, ToolPiece,
};

use super::tools::{OfferedTools, RequestedToolChoice};

/// Settings for reading the answers of a request.
#[derive(Clone, Debug)]
pub(crate) struct AnswerReading {
    /// `None` if the model has no format of reasoning.
    pub reasoning: Option<ReasoningReading>,
    /// `None` if the request offers no tools.
    pub calls: Option<CallReading>,
}

impl AnswerReading {
    /// Returns the settings; `None` if the text of an answer is its content.
    pub(crate) fn of(
        reasoning: Option<ReasoningReading>,
        calls: Option<CallReading>,
    ) -> Option<Self> {
        (reasoning.is_some() || calls.is_some()).then_some(Self { reasoning, calls })
    }

    /// Returns the special tokens that the parsers need as text.
    pub(crate) fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let reasoning = self.reasoning.iter().flat_map(|it| it.format.shown_tokens(tokenizer));
        let calls = self.calls.iter().flat_map(|calls| calls.format.shown_tokens(tokenizer));
        reasoning.chain(calls).collect()
    }

    /// Returns the tokens around the headers of messages, if answers consist of messages.
    pub(crate) fn header_tokens(&self) -> Option<HeaderTokens> {
        self.reasoning?.header_tokens
    }
}

/// Settings for separating reasoning in the answers of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReasoningReading {
    pub format: &'static ReasoningFormat,
    /// Position where answers begin.
    pub start: ReasoningStart,
    /// Token that ends the reasoning.
    pub closing_token: Option<u32>,
    /// Tokens around the headers of messages, if answers consist of messages.
    pub header_tokens: Option<HeaderTokens>,
}

impl ReasoningReading {
    pub(crate) fn new(
        format: &'static ReasoningFormat,
        start: ReasoningStart,
        tokenizer: &Tokenizer,
    ) -> Self {
        let closing_token = format.closing_token(tokenizer);
        Self { format, start, closing_token, header_tokens: format.header_tokens(tokenizer, start) }
    }

    /// Returns the tags of the reasoning that may precede the output of a grammar.
    pub(crate) fn tags(self) -> Option<ReasoningTags> {
        let open = match self.start {
            ReasoningStart::Answer => return None,
            ReasoningStart::Reasoning => None,
            ReasoningStart::Undecided => Some(self.format.open.to_owned()),
        };
        let ReasoningFormat { close, before_answer, never_within, .. } = self.format;
        Some(ReasoningTags {
            open,
            close: (*close).to_owned(),
            before_answer: (*before_answer).to_owned(),
            never_within: never_within.iter().map(|tag| (*tag).to_owned()).collect(),
        })
    }
}

/// Settings for parsing calls in the answers of a request.
#[derive(Clone, Debug)]
pub(crate) struct CallReading {
    pub format: &'static ToolFormat,
    pub functions: Arc<[CallableFunction]>,
    pub parallel: bool,
    /// Whether the client named the function.
    pub is_named: bool,
    /// Whether an answer consists of calls only.
    pub is_required: bool,
    /// Whether a grammar constrains the calls.
    pub has_grammar: bool,
    /// Prefix of the calls' ids.
    pub id: String,
}

impl CallReading {
    pub(crate) fn new(
        tools: &OfferedTools,
        format: &'static ToolFormat,
        request_id: RequestId,
    ) -> Self {
        let functions = tools.callable().map(|function| {
            CallableFunction::new(function.name.as_str(), function.parameters.as_ref())
        });
        Self {
            format,
            functions: functions.collect(),
            parallel: tools.parallel,
            is_named: matches!(tools.choice, RequestedToolChoice::Named(_)),
            is_required: tools.choice != RequestedToolChoice::Auto,
            has_grammar: tools.choice != RequestedToolChoice::Auto
                || tools.callable().any(|function| function.strict),
            id: format!("call_{request_id}"),
        }
    }
}

/// A piece of an answer.
#[derive(Debug, PartialEq)]
pub(crate) enum AnswerPiece {
    /// A piece of the reasoning before the answer.
    Reasoning(String),
    Content(String),
    /// A call. If the answer was cut within its last call, the call is incomplete.
    Call {
        index: u32,
        id: String,
        call: ToolCall,
    },
}

/// Parser of one answer.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    reasoning: Option<ReasoningReader>,
    calls: Option<CallReader>,
    /// Empty between calls, which reuse its memory.
    splits: Vec<SplitText>,
}

impl AnswerReader {
    pub(crate) fn new(reading: &AnswerReading, choice: u32) -> Self {
        Self {
            reasoning: reading.reasoning.map(ReasoningReader::new),
            calls: reading.calls.as_ref().map(|reading| CallReader::new(reading, choice)),
            splits: Vec::new(),
        }
    }

    /// Processes the next tokens of the answer and their text, and appends its pieces.
    pub(crate) fn push(&mut self, tokens: &[Token], text: String, to: &mut Vec<AnswerPiece>) {
        match &mut self.reasoning {
            Some(reader) => reader.push(tokens, text, &mut self.splits),
            None => self.splits.push(SplitText::of_rest(text)),
        }
        self.append_splits(to);
    }

    /// Returns the remaining pieces, and whether the answer ends with calls. `text` is the rest of
    /// the text; `is_cut` means that the model did not end the answer.
    pub(crate) fn finish(mut self, text: String, is_cut: bool) -> (Vec<AnswerPiece>, Calls) {
        let mut pieces = Vec::new();
        self.push(&[], text, &mut pieces);
        if let Some(reader) = self.reasoning.take() {
            reader.parser.finish(&mut self.splits);
            self.append_splits(&mut pieces);
        }
        let calls = match self.calls {
            Some(reader) => reader.finish(is_cut, &mut pieces),
            None => Calls::None,
        };
        (pieces, calls)
    }

    /// Returns the search for the headers of messages, if the answer consists of messages.
    pub(crate) fn header_search(&self) -> Option<HeaderSearch> {
        Some(HeaderSearch::new(self.reasoning.as_ref()?.header_tokens?))
    }

    /// Returns the number of reasoning tokens so far, tags included; `None` if the model has no
    /// format of reasoning.
    pub(crate) fn reasoning_tokens(&self) -> Option<u64> {
        self.reasoning.as_ref().map(|reader| reader.token_count)
    }

    /// Appends the pieces of the text that the reader of the reasoning has split.
    fn append_splits(&mut self, pieces: &mut Vec<AnswerPiece>) {
        for SplitText { reasoning, rest } in self.splits.drain(..) {
            if !reasoning.is_empty() {
                pieces.push(AnswerPiece::Reasoning(reasoning));
            }
            match &mut self.calls {
                _ if rest.is_empty() => {}
                Some(reader) => reader.push(&rest, pieces),
                None => pieces.push(AnswerPiece::Content(rest)),
            }
        }
    }
}

/// Reader of the reasoning in one answer.
#[derive(Debug)]
struct ReasoningReader {
    parser: ReasoningParser,
    closing_token: Option<u32>,
    header_tokens: Option<HeaderTokens>,
    /// Number of reasoning tokens.
    token_count: u64,
    /// Number of tokens before it is known whether the answer begins with reasoning.
    undecided_count: u64,
    counts: bool,
}

impl ReasoningReader {
    fn new(reading: ReasoningReading) -> Self {
        let parser = ReasoningParser::new(reading.format, reading.start);
        let ReasoningReading { closing_token, header_tokens, .. } = reading;
        let (token_count, undecided_count, counts) = (0, 0, true);
        Self { parser, closing_token, header_tokens, token_count, undecided_count, counts }
    }

    /// Appends the final text. `splits` is empty before.
    fn push(&mut self, tokens: &[Token], text: String, splits: &mut Vec<SplitText>) {
        let was_thinking = self.parser.is_thinking();
        self.parser.push(text, splits);
        if self.counts {
            let has_reasoning = splits.iter().any(|split| !split.reasoning.is_empty());
            self.count(tokens, was_thinking || has_reasoning);
        }
    }

    /// Counts the tokens up to the one that ends the reasoning. `has_reasoning`: the text of
    /// these tokens, or the text before, belongs to the reasoning.
    fn count(&mut self, tokens: &[Token], has_reasoning: bool) {
        let close = tokens.iter().position(|token| Some(token.id) == self.closing_token);
        if self.parser.is_thinking() || has_reasoning || close.is_some() {
            let count = close.map_or(tokens.len(), |at| at + 1);
            self.token_count += std::mem::take(&mut self.undecided_count) + count as u64;
        } else if self.parser.is_undecided() {
            self.undecided_count += tokens.len() as u64;
        } else {
            self.undecided_count = 0;
        }
        self.counts = close.is_none() && !self.parser.is_done();
    }
}

/// Reader of the calls in one answer.
#[derive(Debug)]
struct CallReader {
    parser: ToolParser,
    reading: CallReading,
    choice: u32,
    calls: u32,
    /// Whether the last call is incomplete.
    last_is_cut: bool,
    /// Empty between calls of [`Self::push`], which reuse its memory.
    pieces: Vec<ToolPiece>,
}

impl CallReader {
    fn new(reading: &CallReading, choice: u32) -> Self {
        let parser = ToolParser::new(reading.format, reading.functions.clone());
        let parser = if reading.has_grammar { parser.with_first_tag() } else { parser };
        let (reading, pieces) = (reading.clone(), Vec::new());
        Self { parser, reading, choice, calls: 0, last_is_cut: false, pieces }
    }

    fn push(&mut self, text: &str, to: &mut Vec<AnswerPiece>) {
        self.parser.push(text, &mut self.pieces);
        self.number(to);
    }

    /// Appends the remaining pieces, and returns whether the answer ends with calls.
    fn finish(mut self, is_cut: bool, to: &mut Vec<AnswerPiece>) -> Calls {
        match is_cut {
            true => self.parser.finish_cut(&mut self.pieces),
            false => self.parser.finish(&mut self.pieces),
        }
        if is_cut && self.reading.is_required {
            // The beginning of a call that has no name yet.
            self.pieces.retain(|piece| !matches!(piece, ToolPiece::Content(_)));
        }
        self.number(to);
        match (self.calls, self.reading.parallel) {
            (0, _) => Calls::None,
            _ if self.last_is_cut => Calls::Cut,
            _ if self.reading.is_named => Calls::Named,
            (_, true) => Calls::Some,
            (_, false) => Calls::OnlyOne,
        }
    }

    /// Appends the pieces. Drops everything after the first call if only one call is allowed.
    fn number(&mut self, to: &mut Vec<AnswerPiece>) {
        for piece in self.pieces.drain(..) {
            if self.calls > 0 && !self.reading.parallel {
                break;
            }
            let (call, is_cut) = match piece {
                ToolPiece::Content(text) => {
                    to.push(AnswerPiece::Content(text));
                    continue;
                }
                ToolPiece::Call(call) => (call, false),
                ToolPiece::CutCall(call) => (call, true),
            };
            let index = self.calls;
            (self.calls, self.last_is_cut) = (index + 1, is_cut);
            let id = format!("{}_{}_{index}", self.reading.id, self.choice);
            to.push(AnswerPiece::Call { index, id, call });
        }
    }
}

/// Calls of an answer, as far as the finish reason depends on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Calls {
    None,
    Some,
    /// Only one call is allowed, and the answer ends with it.
    OnlyOne,
    /// The client named the called function.
    Named,
    /// The last call is incomplete.
    Cut,
}

impl Calls {
    /// Returns the finish reason. A truncated answer reports its truncation unless the answer ends
    /// with its only call. A call of a named function reports `stop`, as in OpenAI and vLLM.
    pub(crate) fn finish_reason(self, reason: FinishReason) -> FinishReason {
        match (self, reason) {
            (Self::OnlyOne, _) | (Self::Some, FinishReason::Stop) => FinishReason::ToolCalls,
            (_, reason) => reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_parallel_calls_the_answer_ends_with_its_first_call() {
        let text = "a <tool_call>{\"name\": \"f\"}</tool_call> b <tool_call>{\"name\": \"f\"}</tool_call> c";
        let read = |parallel, is_named| {
            let functions = Arc::new([CallableFunction::new("f", None)]);
            let id = "call_1".to_owned();
            let format = ToolFormat::named("hermes").unwrap();
            let is_required = false;
            let has_grammar = false;
            let calls =
                CallReading { format, functions, parallel, is_named, is_required, has_grammar, id };
            let reading = AnswerReading { reasoning: None, calls: Some(calls) };
            let mut reader = AnswerReader::new(&reading, 2);
            let mut pieces = Vec::new();
            reader.push(&[], text[..40].to_owned(), &mut pieces);
            let (rest, calls) = reader.finish(text[40..].to_owned(), false);
            pieces.extend(rest);
            (pieces, calls)
        };
        let content = |text: &str| AnswerPiece::Content(text.into());
        let call = |index| AnswerPiece::Call {
            index,
            id: format!("call_1_2_{index}"),
            call: ToolCall { name: "f".into(), arguments: "{}".into() },
        };
        assert_eq!(read(false, false), (vec![content("a"), call(0)], Calls::OnlyOne));
        assert_eq!(read(false, true).1, Calls::Named);
        let all = vec![content("a"), call(0), content(" b"), call(1), content(" c")];
        assert_eq!(read(true, false), (all, Calls::Some));
    }

    #[test]
    fn finish_reason_depends_on_the_tool_calls() {
        use FinishReason::{Length, Stop, ToolCalls};
        for (calls, of_stop, of_length) in [
            (Calls::None, Stop, Length),
            (Calls::Some, ToolCalls, Length),
            (Calls::OnlyOne, ToolCalls, ToolCalls),
            (Calls::Named, Stop, Length),
            (Calls::Cut, Stop, Length),
        ] {
            assert_eq!(
                (calls.finish_reason(Stop), calls.finish_reason(Length)),
                (of_stop, of_length)
            );
        }
    }
}
