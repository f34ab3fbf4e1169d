//! Finds the start of multimodal items that engines describe block by block.
//!
//! An engine reports which part of a block an item covers, so that an item of several blocks starts
//! at the beginning of each block after the first. Queries contain the true start of the item. Both
//! give equal hashes only if events contain the true start, which lies before these blocks.

use std::collections::{BTreeMap, HashMap};

use crate::error::{Result, invalid};
use crate::wire::Item;

/// Blocks whose items continue after them, remembered for later calls; the oldest are dropped
/// first.
const OPEN_BLOCKS_MAX: usize = 16_384;

/// No item begins earlier, relative to a block: far more tokens than any prompt has.
const START_MIN: i64 = -(1 << 32);

/// The part of a block that an item covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Index of the item in the block, for messages.
    pub item: usize,
    /// The item's hash.
    pub hash: u64,
    /// Its first token, relative to the block's; negative if it begins in an earlier block.
    pub start: i64,
    /// One more than its last token.
    pub end: i64,
}

/// Items that reach a block's end: the start of each, relative to the block's first token.
type Open = HashMap<u64, i64>;
/// The items of blocks, and for each block those that reach its end.
type Placed = (Option<Vec<Vec<Item>>>, Vec<Open>);

/// The items that later calls may continue.
#[derive(Debug)]
pub struct ItemPlaces {
    block_size: i64,
    blocks_max: usize,
    open: HashMap<u64, (u64, Open)>,
    /// Names of blocks by age.
    ages: BTreeMap<u64, u64>,
    next_age: u64,
}

impl ItemPlaces {
    /// For blocks of `block_size` tokens.
    pub fn new(block_size: u32) -> Self {
        Self {
            block_size: i64::from(block_size),
            blocks_max: OPEN_BLOCKS_MAX,
            open: HashMap::new(),
            ages: BTreeMap::new(),
            next_age: 0,
        }
    }

    /// The start of each item in consecutive blocks that follow `parent`. Pass the second value to
    /// [`ItemPlaces::remember`] when the call is accepted.
    ///
    /// # Errors
    /// `InvalidArgument` for a part outside of its block, and if the number of blocks differs.
    pub fn begins(&self, parts: &[Vec<Part>], parent: Option<u64>) -> Result<Placed> {
        let mut before = parent.and_then(|name| self.open.get(&name)).map(|(_, open)| open);
        let mut placed = Vec::with_capacity(parts.len());
        let mut reached: Vec<Open> = Vec::with_capacity(parts.len());
        for (block, parts) in parts.iter().enumerate() {
            let (items, open) = self.block(block, parts, before)?;
            placed.push(items);
            reached.push(open);
            before = reached.last();
        }
        let has_any = placed.iter().any(|items| !items.is_empty());
        Ok((has_any.then_some(placed), reached))
    }

    /// Remembers the items that reach the end of blocks; `reached` is empty for blocks without any.
    pub fn remember(&mut self, names: &[u64], reached: Vec<Open>) {
        if self.open.is_empty() && reached.is_empty() {
            return;
        }
        let mut reached = reached.into_iter();
        for &name in names {
            if let Some((age, _)) = self.open.remove(&name) {
                self.ages.remove(&age);
            }
            let Some(open) = reached.next().filter(|open| !open.is_empty()) else { continue };
            self.open.insert(name, (self.next_age, open));
            self.ages.insert(self.next_age, name);
            self.next_age += 1;
        }
        while self.open.len() > self.blocks_max
            && let Some((_, name)) = self.ages.pop_first()
        {
            self.open.remove(&name);
        }
    }

    /// Drops all blocks.
    pub fn clear(&mut self) {
        self.open.clear();
        self.ages.clear();
    }

    /// Number of blocks whose items continue after them.
    pub fn open_blocks(&self) -> usize {
        self.open.len()
    }

    /// A block's items, and those of them that reach its end.
    fn block(
        &self,
        block: usize,
        parts: &[Part],
        before: Option<&Open>,
    ) -> Result<(Vec<Item>, Open)> {
        let size = self.block_size;
        let (mut items, mut reached) = (Vec::with_capacity(parts.len()), Open::new());
        for &Part { item, hash, start, end } in parts {
            if start < START_MIN || start >= end.min(size) || end <= 0 {
                return Err(invalid(format!(
                    "block_mm_infos[{block}].mm_objects[{item}].offsets must be [start, end) with \
                     start below the block size {size} and at least {START_MIN}, and end above 0 \
                     and start, counted from the block's first token, got [{start}, {end}]"
                )));
            }
            let earlier = before.and_then(|open| open.get(&hash)).filter(|_| start == 0);
            let begin = earlier.map_or(start, |begin| begin - size);
            if end >= size {
                reached.insert(hash, begin);
            }
            // Receivers take an identifier of 64 hexadecimal digits for the hash at its beginning.
            items.push((format!("{hash:016x}{:048}", 0), begin));
        }
        Ok((items, reached))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(hash: u64, start: i64, end: i64) -> Vec<Part> {
        vec![Part { item: 0, hash, start, end }]
    }

    /// The start of the only item of each block.
    fn begins(
        places: &mut ItemPlaces,
        parts: &[Vec<Part>],
        names: &[u64],
        parent: Option<u64>,
    ) -> Vec<i64> {
        let (items, reached) = places.begins(parts, parent).expect("legal");
        places.remember(names, reached);
        let begin = |items: &Vec<Item>| match &items[..] {
            [(identifier, begin)] if identifier.len() == 64 => *begin,
            other => panic!("{other:?}"),
        };
        items.expect("items").iter().map(begin).collect()
    }

    #[test]
    fn an_item_of_several_blocks_begins_in_the_first() {
        let mut places = ItemPlaces::new(4);
        let first = [part(7, 3, 4), part(7, 0, 4)];
        assert_eq!(begins(&mut places, &first, &[1, 2], None), [3, -1]);
        assert_eq!(begins(&mut places, &[part(7, 0, 2)], &[3], Some(2)), [-5]);
        assert_eq!(begins(&mut places, &[part(7, -1, 2)], &[4], Some(1)), [-1], "as it is given");
        assert_eq!(begins(&mut places, &[part(8, 0, 4)], &[5], Some(2)), [0], "another item");
        assert_eq!(begins(&mut places, &[part(7, 0, 4)], &[6], Some(3)), [0], "3 was not filled");
        assert_eq!(places.open_blocks(), 4);
        places.clear();
        assert_eq!(places.open_blocks(), 0);
    }

    #[test]
    fn open_blocks_are_limited_and_a_name_is_of_its_last_block() {
        let mut places = ItemPlaces { blocks_max: 2, ..ItemPlaces::new(4) };
        for name in 1..=3 {
            begins(&mut places, &[part(7, 2, 4)], &[name], None);
        }
        assert_eq!(places.open_blocks(), 2);
        assert_eq!(begins(&mut places, &[part(7, 0, 1)], &[9], Some(3)), [-2]);
        assert_eq!(begins(&mut places, &[part(7, 0, 1)], &[9], Some(1)), [0], "forgotten");
        places.remember(&[3], Vec::new());
        assert_eq!(places.open_blocks(), 1, "3 is another block's name now, without the item");
    }

    #[test]
    fn the_earliest_start_can_be_continued() {
        let mut places = ItemPlaces::new(4);
        let parts = [part(7, START_MIN, 4), part(7, 0, 4)];
        assert_eq!(begins(&mut places, &parts, &[1, 2], None), [START_MIN, START_MIN - 4]);
    }

    #[test]
    fn a_part_outside_of_its_block_is_named() {
        let places = ItemPlaces::new(4);
        for (start, end) in [(4, 5), (0, 0), (2, 2), (-2, 0), (i64::MIN, 4)] {
            let text = places.begins(&[vec![], part(1, start, end)], None).expect_err("refused");
            assert!(
                text.to_string().starts_with("block_mm_infos[1].mm_objects[0].offsets must be")
            );
        }
    }
}
