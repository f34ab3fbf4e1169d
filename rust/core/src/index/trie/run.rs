//! The writer's data about a run that readers do not see: its names, and its dependents.

use crate::index::arena::runs::RunId;

/// Number of a column of names within a run.
pub(super) type ColumnId = u16;

/// No column, because predictions have no names.
pub(super) const NO_COLUMN: ColumnId = u16::MAX;

/// Names of the run's blocks, from the first on, for some of its holders. Engines with equal hashes
/// share one.
#[derive(Debug, Default, Clone)]
pub(super) struct Column {
    pub names: Vec<u64>,
    pub users: u32,
}

impl Column {
    /// Adds names, growing by an eighth: most additions are single blocks of a running request.
    pub fn extend(&mut self, names: impl ExactSizeIterator<Item = u64>) {
        if self.names.capacity() - self.names.len() < names.len() {
            let spare =
                if self.names.is_empty() { 0 } else { (self.names.len() / 8).clamp(4, 512) };
            self.names.reserve_exact(names.len() + spare);
        }
        self.names.extend(names);
    }
}

/// The writer's side of a run.
#[derive(Debug, Default)]
pub(super) struct RunMeta {
    first: Column,
    #[expect(clippy::box_collection, reason = "hardly any run has others: a word, not three")]
    others: Option<Box<Vec<Column>>>,
    /// Child runs.
    pub kids: u32,
    /// Members, in all planes.
    pub holders: u32,
    /// Members with a cover published as whole: only if it is the only one can blocks be added in
    /// place.
    pub wholes: u32,
    /// Blocks with any holder, without predictions, at the last count.
    pub held: u32,
    /// Whether `held` is out of date.
    pub is_uncounted: bool,
}

impl RunMeta {
    pub fn column(&self, id: ColumnId) -> &Column {
        match id {
            0 => &self.first,
            id => &self.others.as_ref().expect("a column that is used is there")[id as usize - 1],
        }
    }

    pub fn column_mut(&mut self, id: ColumnId) -> &mut Column {
        match id {
            0 => &mut self.first,
            id => {
                &mut self.others.as_mut().expect("a column that is used is there")[id as usize - 1]
            }
        }
    }

    /// Columns with their numbers, including unused ones.
    pub fn columns(&self) -> impl Iterator<Item = (ColumnId, &Column)> {
        let others = self.others.iter().flat_map(|others| others.iter());
        std::iter::once(&self.first).chain(others).zip(0..).map(|(column, id)| (id, column))
    }

    /// Finds an empty column, or creates one. `None` if no number is left.
    pub fn new_column(&mut self) -> Option<ColumnId> {
        let is_free = |column: &Column| column.users == 0 && column.names.is_empty();
        if let Some((id, _)) = self.columns().find(|(_, column)| is_free(column)) {
            return Some(id);
        }
        let others = self.others.get_or_insert_default();
        if others.len() + 1 >= NO_COLUMN as usize {
            return None;
        }
        others.push(Column::default());
        Some(others.len() as ColumnId)
    }

    /// Frees the numbers of unused columns at the end.
    pub fn trim(&mut self) {
        if let Some(others) = &mut self.others {
            while others.last().is_some_and(|c| c.users == 0 && c.names.is_empty()) {
                others.pop();
            }
            if others.is_empty() {
                self.others = None;
            }
        }
    }

    /// Bytes of the list of columns beyond the first.
    pub fn list_bytes(&self) -> usize {
        self.others
            .as_ref()
            .map_or(0, |others| size_of::<Vec<Column>>() + others.capacity() * size_of::<Column>())
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        let names = |(_, column): (ColumnId, &Column)| column.names.capacity() * size_of::<u64>();
        self.list_bytes() + self.columns().map(names).sum::<usize>()
    }
}

/// Location of a block: run and offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Loc {
    pub run: RunId,
    pub offset: u32,
}
