//! Groups of layers that need different parts of a prompt, over one pool.

use crate::pool::{NULL, Pool};

/// What the layers of a group look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// All that came before.
    Full,
    /// The last so many tokens.
    Window(u64),
    /// What came before in the same chunk of so many tokens.
    Chunk(u64),
}

/// A group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// What its layers look at.
    pub reach: Reach,
    /// Tokens in a block.
    pub block_size: u64,
}

impl Group {
    /// Leading tokens that nobody looks at any more once `computed` are there.
    pub fn skipped(&self, computed: u64) -> u64 {
        match self.reach {
            Reach::Full => 0,
            Reach::Window(wide) => (computed + 1).saturating_sub(wide),
            Reach::Chunk(size) => computed / size * size,
        }
    }

    /// Blocks of the longest prefix of at most `most` tokens, a multiple of `align`, that can be gone on from.
    ///
    /// # Source
    /// vLLM 0.32, `find_longest_cache_hit` of `v1/core/single_type_kv_cache_manager.py`.
    pub fn hit(&self, place: u8, ids: &[u64], most: u64, align: u64, pool: &Pool) -> Vec<u32> {
        let size = self.block_size;
        let most_blocks = ((most / size) as usize).min(ids.len());
        let find = |at: usize| pool.find((place, ids[at]));
        let mut found = match self.reach {
            Reach::Full => (0..most_blocks).map_while(find).collect(),
            Reach::Chunk(chunk) => {
                let start = ((most / chunk * chunk / size) as usize).min(most_blocks);
                let mut found = vec![NULL; start];
                found.extend((start..most_blocks).map_while(find));
                found
            }
            Reach::Window(wide) => return self.window(wide, most_blocks, align, &find),
        };
        while !(found.len() as u64 * size).is_multiple_of(align) {
            found.pop();
        }
        found
    }

    /// From the end: the last run of blocks that covers a window.
    fn window(
        &self,
        wide: u64,
        most: usize,
        align: u64,
        find: &dyn Fn(usize) -> Option<u32>,
    ) -> Vec<u32> {
        let size = self.block_size;
        let needed = (wide - 1).div_ceil(size) as usize;
        let mut found = vec![NULL; most];
        let mut run = 0;
        for at in (0..most).rev() {
            let Some(block) = find(at) else {
                run = 0;
                continue;
            };
            if run == 0 && !((at + 1) as u64 * size).is_multiple_of(align) {
                continue;
            }
            found[at] = block;
            run += 1;
            if run >= needed {
                found.truncate(at + run);
                return found;
            }
        }
        // The prompt's start is as good as a window that goes further back.
        found.truncate(run);
        while !(found.len() as u64 * size).is_multiple_of(align) {
            found.pop();
        }
        found
    }
}

/// The blocks, by group, of the longest prefix of at most `most` tokens that every group can go on from, and its
/// length in tokens.
pub fn longest_hit(
    groups: &[Group],
    ids: &[std::sync::Arc<[u64]>],
    most: u64,
    pool: &Pool,
) -> (u64, Vec<Vec<u32>>) {
    let align = alignment(groups);
    let mut length = most;
    let mut found: Vec<Vec<u32>> = vec![Vec::new(); groups.len()];
    loop {
        let before = length;
        for (place, group) in groups.iter().enumerate() {
            found[place] = group.hit(place as u8, &ids[place], length, align, pool);
            length = found[place].len() as u64 * group.block_size;
        }
        if length == before || groups.len() == 1 {
            break;
        }
    }
    for (blocks, group) in found.iter_mut().zip(groups) {
        blocks.truncate((length / group.block_size) as usize);
    }
    (length, found)
}

/// What lengths of hits are multiples of, in tokens.
pub fn alignment(groups: &[Group]) -> u64 {
    groups.iter().map(|group| group.block_size).fold(1, lcm)
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
