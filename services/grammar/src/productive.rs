//! Removal of dead ends from a compiled grammar.
//!
//! llguidance allows every token after which its parser expects a lexeme, even if no string matches
//! the lexeme or if the rule never ends. A rule is productive if its symbols are productive. A
//! lexeme is productive if a string matches it, a symbol if one of its rules is productive. With
//! productive rules alone, each prefix of an output can be continued to a whole output.

use std::{collections::HashMap, fmt::Display};

use llguidance::{
    api::ParserLimits,
    earley::{CGrammar, CSymIdx, Grammar, lexerspec::LexerSpec, regexvec::LexemeSet},
};

use crate::error::{GrammarError, unsupported};

/// Returns the grammar without rules that no output uses. `matchable`: lexemes that a string
/// matches.
pub(crate) fn without_dead_ends(
    grammar: Grammar,
    lexer: &LexerSpec,
    matchable: &LexemeSet,
    limits: &ParserLimits,
) -> Result<Grammar, GrammarError> {
    // Only the compiled form has public rules. They do not depend on the lexer.
    let no_lexer = LexerSpec::new().map_err(failed)?;
    let compiled = grammar.compile(no_lexer, limits).map_err(failed)?;
    let symbols = Symbols::reached(&compiled);
    let is_productive = symbols.productive(&compiled, matchable);
    if !is_productive[0] {
        return Err(unsupported("no output matches it"));
    }
    if is_productive.iter().all(|is| *is) {
        return Ok(grammar);
    }
    symbols.rebuilt(&compiled, lexer, &is_productive)
}

fn failed(error: impl Display) -> GrammarError {
    unsupported(&error.to_string())
}

/// A rule of a grammar: the symbol that it defines, and the symbols of its right side.
struct SymbolRule {
    symbol: usize,
    parts: Vec<usize>,
}

/// The symbols of a grammar that its start symbol reaches. The start symbol is the first one.
struct Symbols {
    reached: Vec<CSymIdx>,
    rules: Vec<SymbolRule>,
}

impl Symbols {
    fn reached(grammar: &CGrammar) -> Self {
        let mut symbols = Self { reached: vec![grammar.start()], rules: Vec::new() };
        let mut numbers = HashMap::from([(grammar.start(), 0)]);
        let mut next = 0;
        while let Some(&symbol) = symbols.reached.get(next) {
            for &rule in grammar.rules_of(symbol) {
                let number = |&part: &CSymIdx| {
                    *numbers.entry(part).or_insert_with(|| {
                        symbols.reached.push(part);
                        symbols.reached.len() - 1
                    })
                };
                let parts = grammar.rule_rhs(rule).0.iter().map(number).collect();
                symbols.rules.push(SymbolRule { symbol: next, parts });
            }
            next += 1;
        }
        symbols
    }

    /// Returns for each symbol whether a string matches it. Takes time in proportion to the size of
    /// the grammar.
    fn productive(&self, grammar: &CGrammar, matchable: &LexemeSet) -> Vec<bool> {
        let mut uses = vec![Vec::new(); self.reached.len()];
        let mut missing: Vec<usize> = self.rules.iter().map(|rule| rule.parts.len()).collect();
        for (index, rule) in self.rules.iter().enumerate() {
            rule.parts.iter().for_each(|&part| uses[part].push(index));
        }
        let mut is_productive = vec![false; self.reached.len()];
        let mut found: Vec<usize> = (0..self.reached.len())
            .filter(|&symbol| {
                let data = grammar.sym_data(self.reached[symbol]);
                data.is_nullable || data.lexeme.is_some_and(|lexeme| matchable.contains(lexeme))
            })
            .collect();
        while let Some(symbol) = found.pop() {
            if std::mem::replace(&mut is_productive[symbol], true) {
                continue;
            }
            for &rule in &uses[symbol] {
                missing[rule] -= 1;
                if missing[rule] == 0 {
                    found.push(self.rules[rule].symbol);
                }
            }
        }
        is_productive
    }

    /// Returns a grammar of the productive symbols and rules.
    fn rebuilt(
        &self,
        grammar: &CGrammar,
        lexer: &LexerSpec,
        is_productive: &[bool],
    ) -> Result<Grammar, GrammarError> {
        let mut rebuilt = Grammar::new(None);
        // Symbols are made in order, so the start symbol stays the first one.
        let symbols: Vec<_> = self
            .reached
            .iter()
            .zip(is_productive)
            .map(|(&symbol, is_productive)| {
                let data = grammar.sym_data(symbol);
                is_productive.then(|| rebuilt.fresh_symbol_ext(&data.name, data.props.clone()))
            })
            .collect();
        for (&symbol, new) in self.reached.iter().zip(&symbols) {
            let (data, Some(new)) = (grammar.sym_data(symbol), *new) else { continue };
            if let Some(options) = &data.gen_grammar {
                rebuilt.make_gen_grammar(new, options.clone()).map_err(failed)?;
            }
            match data.lexeme {
                Some(lexeme) => rebuilt.make_terminal(new, lexeme, lexer).map_err(failed)?,
                None if data.is_nullable => rebuilt.add_rule(new, Vec::new()).map_err(failed)?,
                None => {}
            }
        }
        for rule in &self.rules {
            let parts: Option<Vec<_>> = rule.parts.iter().map(|&part| symbols[part]).collect();
            if let (Some(symbol), Some(parts)) = (symbols[rule.symbol], parts) {
                rebuilt.add_rule(symbol, parts).map_err(failed)?;
            }
        }
        Ok(rebuilt)
    }
}
