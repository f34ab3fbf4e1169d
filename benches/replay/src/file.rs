//! The corpus as a file: the same bytes for every index.
//!
//! Little-endian 64-bit words: magic, version, seven counts, the sections in the order of [`Corpus`]'s
//! fields, and an XXH3 of all that.

use std::fs;
use std::io::{self, Error, ErrorKind};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use crate::corpus::{Check, Corpus, Item, Kind, NamedBlock};

const MAGIC: u64 = u64::from_le_bytes(*b"KVFRPLAY");
const VERSION: u64 = 1;

/// Writes `corpus`.
///
/// # Errors
/// When the file can't be written.
pub fn write(corpus: &Corpus, path: &Path) -> io::Result<()> {
    let mut words = vec![
        MAGIC,
        VERSION,
        u64::from(corpus.workers),
        corpus.items.len() as u64,
        corpus.blocks.len() as u64,
        corpus.names.len() as u64,
        corpus.queries.len() as u64,
        corpus.locals.len() as u64,
        corpus.checks.len() as u64,
    ];
    for item in &corpus.items {
        let kind = item.kind as u64 | u64::from(item.parent.is_some()) << 8;
        let parent = item.parent.unwrap_or(0);
        words.extend([kind | u64::from(item.worker) << 32, parent]);
        words.extend([item.start as u64, item.len as u64]);
    }
    words.extend(corpus.blocks.iter().flat_map(|block| [block.name, block.local]));
    words.extend(&corpus.names);
    words.extend(corpus.queries.iter().flat_map(|query| [query.0 as u64, query.1 as u64]));
    words.extend(&corpus.locals);
    for check in &corpus.checks {
        words.extend([check.after, check.query, check.answer.len()].map(|word| word as u64));
        words.extend(check.answer.iter().map(|at| u64::from(at.0) << 32 | u64::from(at.1)));
    }
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    fs::write(path, bytes)
}

/// Reads a corpus.
///
/// # Errors
/// When the file can't be read, is of another version, or was damaged.
pub fn read(path: &Path) -> io::Result<Corpus> {
    let bytes = fs::read(path)?;
    let (content, sum) = bytes.split_last_chunk::<8>().ok_or(bad("too short"))?;
    if xxh3_64(content) != u64::from_le_bytes(*sum) {
        return Err(bad("its checksum is not that of its content"));
    }
    let mut words = Words(content);
    if [words.next()?, words.next()?] != [MAGIC, VERSION] {
        return Err(bad("not a corpus of this version"));
    }
    let workers = words.next()? as u32;
    let counts = words.take::<6>()?;
    let [items, blocks, names, queries, locals, checks] = counts.map(|count| count as usize);
    Ok(Corpus {
        workers,
        items: (0..items).map(|_| item(&mut words)).collect::<io::Result<_>>()?,
        blocks: (0..blocks)
            .map(|_| words.take().map(|[name, local]| NamedBlock { name, local }))
            .collect::<io::Result<_>>()?,
        names: (0..names).map(|_| words.next()).collect::<io::Result<_>>()?,
        queries: (0..queries)
            .map(|_| words.take().map(|[start, len]| (start as usize, len as usize)))
            .collect::<io::Result<_>>()?,
        locals: (0..locals).map(|_| words.next()).collect::<io::Result<_>>()?,
        checks: (0..checks).map(|_| check(&mut words)).collect::<io::Result<_>>()?,
    })
}

fn item(words: &mut Words<'_>) -> io::Result<Item> {
    let [head, parent, start, len] = words.take()?;
    let kind = match head as u8 {
        0 => Kind::Stored,
        1 => Kind::Removed,
        2 => Kind::Asked,
        _ => return Err(bad("an item of unknown kind")),
    };
    let parent = (head >> 8 & 1 == 1).then_some(parent);
    let worker = (head >> 32) as u32;
    Ok(Item { kind, worker, parent, start: start as usize, len: len as usize })
}

fn check(words: &mut Words<'_>) -> io::Result<Check> {
    let [after, query, len] = words.take()?.map(|word| word as usize);
    let answer = (0..len).map(|_| words.next().map(|at| ((at >> 32) as u32, at as u32)));
    Ok(Check { after, query, answer: answer.collect::<io::Result<_>>()? })
}

struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn next(&mut self) -> io::Result<u64> {
        let (word, rest) = self.0.split_first_chunk::<8>().ok_or(bad("it ends too early"))?;
        self.0 = rest;
        Ok(u64::from_le_bytes(*word))
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u64; N]> {
        let mut words = [0; N];
        for word in &mut words {
            *word = self.next()?;
        }
        Ok(words)
    }
}

fn bad(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("corpus: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::{EventView, Names, Recipe};
    use crate::trace;

    fn small(names: Names) -> Corpus {
        let recipe = Recipe { workers: 3, capacity_blocks: 900, names, ..Recipe::default() };
        Corpus::build(&trace::generate(400, 7), &recipe)
    }

    #[test]
    fn what_is_written_is_read() {
        let path = std::env::temp_dir().join(format!("kvflash-corpus-{}", std::process::id()));
        let corpus = small(Names::Agree);
        write(&corpus, &path).expect("it can be written");
        assert_eq!(read(&path).expect("it can be read"), corpus);
        let mut bytes = fs::read(&path).expect("it is there");
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, &bytes).expect("it can be written");
        assert!(read(&path).is_err(), "a damaged file is refused");
        fs::remove_file(&path).expect("it is there");
    }

    #[test]
    fn a_corpus_has_everything_in_it() {
        for names in [Names::Agree, Names::Differ] {
            let corpus = small(names);
            let removed = corpus.events().filter(|e| matches!(e, EventView::Removed { .. }));
            assert!(removed.count() > 100, "engines run full");
            assert!(corpus.checks.len() >= 300);
            let deep = corpus.checks.iter().flat_map(|check| &check.answer).filter(|at| at.1 > 4);
            assert!(deep.count() > 100, "prompts are found beyond the system prompt");
            let held: usize = corpus.held_at_end().iter().map(Vec::len).sum();
            assert!(held <= 3 * 900 && held > 3 * 700);
        }
    }

    #[test]
    fn one_id_is_equal_blocks_in_a_row() {
        let corpus = small(Names::Agree);
        let first = corpus.query(0);
        assert!(first.len() >= 4 && first[..4].iter().all(|local| *local == first[0]));
    }
}
