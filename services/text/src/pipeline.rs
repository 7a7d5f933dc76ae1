//! Implements the `Model` trait of the `tokenizers` crate for a vocabulary. The crate's pipeline
//! looks up added tokens in this model.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};

use tokenizers::{Model, Token, models::bpe::BpeTrainer};

use crate::vocabulary::Vocabulary;

pub(crate) struct PipelineModel<'a>(pub &'a Vocabulary);

impl Model for PipelineModel<'_> {
    type Trainer = BpeTrainer;

    fn tokenize(&self, _: &str) -> tokenizers::Result<Vec<Token>> {
        Err("words are encoded outside of the pipeline".into())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0.string(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        (0..self.0.size()).filter_map(|id| Some((self.0.string(id)?.to_owned(), id))).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.size() as usize
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("this model is only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
