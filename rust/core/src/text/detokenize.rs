//! Token ids to text as they arrive.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Most tokens held back for a character that does not complete. A character has four bytes at
/// most; a run of this length is broken text and is given out as it stands.
const PENDING_TOKENS_MAX: usize = 64;

/// Turns a stream of token ids into text, complete characters only.
///
/// Decoders look at neighbours (a leading space, a character spread over tokens), so each step
/// decodes the tokens of the last two pieces of text and gives out what is new.
///
/// # Consistency
/// All increments and the final [`finish`](Self::finish) concatenated are the text of all ids
/// decoded at once, unless more than 64 tokens in a row do not make a character. Bytes
/// that make none spoil the characters before them when all is decoded at once, and nothing here.
///
/// # Cost
/// Two decodes of a few tokens per step.
#[derive(Debug)]
pub struct Detokenizer<T> {
    tokenizer: T,
    skip_special_tokens: bool,
    /// Tokens of the last piece given out, then those not given out yet.
    ids: Vec<u32>,
    given_tokens: usize,
}

impl<T: AsRef<Tokenizer>> Detokenizer<T> {
    /// A stream at its start, with a tokenizer of its own, borrowed or shared.
    pub fn new(tokenizer: T, skip_special_tokens: bool) -> Self {
        Self { tokenizer, skip_special_tokens, ids: Vec::new(), given_tokens: 0 }
    }

    /// Take one more token; the text that is complete with it, possibly empty.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.step(false)
    }

    /// The text still held back, as far as it can be read; the stream starts over.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<String> {
        let rest = self.step(true)?;
        self.ids.clear();
        self.given_tokens = 0;
        Ok(rest)
    }

    fn step(&mut self, is_last: bool) -> Result<String> {
        let given = self.decode(&self.ids[..self.given_tokens])?;
        let mut text = self.decode(&self.ids)?;
        let is_whole = is_last
            || !text.ends_with(char::REPLACEMENT_CHARACTER)
            || self.ids.len() - self.given_tokens > PENDING_TOKENS_MAX;
        if text.len() <= given.len() || !is_whole {
            return Ok(String::new());
        }
        self.ids.drain(..self.given_tokens);
        self.given_tokens = self.ids.len();
        if !text.starts_with(&given) && text.contains(char::REPLACEMENT_CHARACTER) {
            // Broken bytes spoil the whole run of bytes that they are in, that of the last piece too.
            return self.decode(&self.ids);
        }
        // The same tokens with more after them: their text is a prefix, but a decoder that joins
        // bytes may have changed its mind about broken ones.
        let mut at = given.len();
        while !text.is_char_boundary(at) {
            at += 1;
        }
        Ok(text.split_off(at))
    }

    fn decode(&self, ids: &[u32]) -> Result<String> {
        self.tokenizer.as_ref().decode(ids, self.skip_special_tokens)
    }
}
