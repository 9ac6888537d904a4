//! Merging: a block that becomes free and its free neighbours become one block, at once.
//!
//! ```text
//!  prev      freed     next                          prev keeps its slot if it is free, else next does:
//!  free    + block   + free    ──►  prev             what is free already has a place in the free index
//!  free    + block             ──►  prev
//!            block   + free    ──►  next
//! ```
//! What had to be waited for before one of them is used must be waited for before the result is.

use crate::block_table::{Block, BlockState, Slot, Tiling};
use crate::fence::{Fence, FenceTable};
use crate::free_index::FreeIndex;
use crate::size_rules::SizeClass;

/// Who may have used a block that is put back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Users {
    /// The stream of its heap, and nobody else: there is nothing to wait for.
    Owner,
    /// The stream of its heap, and others that its fences name.
    Fenced,
    /// Any stream: the heap's streams share.
    Several,
}

/// Puts a block that is in no index into the free index, merged with its free neighbours. It is free from now on, in this
/// `state`. Returns the result.
#[inline(always)]
pub(crate) fn merge(
    tiling: &mut Tiling<'_>,
    (index, home): (&mut FreeIndex, SizeClass),
    fences: &mut FenceTable,
    users: Users,
    (slot, state): (Slot, BlockState),
) -> Slot {
    let Block { prev, next, .. } = tiling.blocks[slot as usize];
    if tiling.is_free(prev) {
        cover(tiling, fences, users, (slot, state), prev);
        let (back, behind) = if tiling.is_free(next) {
            index.unchain(tiling.blocks, next);
            // Others may have used this one before the freed block's owner used that.
            let users = if users == Users::Owner { Users::Fenced } else { users };
            let Block { state, size, next: behind, .. } = tiling.blocks[next as usize];
            cover(tiling, fences, users, (next, state), prev);
            (size, behind)
        } else {
            (0, next)
        };
        tiling.join(prev, behind);
        let Block { place, size: front, .. } = tiling.blocks[prev as usize];
        let size = front + tiling.blocks[slot as usize].size + back;
        index.resize(tiling.blocks, home, prev, place, size);
        prev
    } else if tiling.is_free(next) {
        cover(tiling, fences, users, (slot, state), next);
        tiling.join(prev, next);
        // What a block was is in its vacant slot until that is used again.
        let Block { place, size: front, .. } = tiling.blocks[slot as usize];
        let size = front + tiling.blocks[next as usize].size;
        index.resize(tiling.blocks, home, next, place, size);
        next
    } else {
        tiling.blocks[slot as usize].state = state;
        index.insert(tiling.blocks, home, slot);
        slot
    }
}

/// Gives up a free block whose place a free neighbour is about to cover. What had to be waited for before the one is
/// waited for before the other.
#[inline(always)]
fn cover(tiling: &mut Tiling<'_>, fences: &mut FenceTable, users: Users, (from, state): (Slot, BlockState), to: Slot) {
    let (giver, taker) = (&tiling.blocks[from as usize], &tiling.blocks[to as usize]);
    match users {
        Users::Owner => {}
        Users::Fenced if giver.fences.is_empty() => {}
        Users::Fenced if taker.fences.is_empty() => tiling.blocks[to as usize].fences = giver.fences,
        Users::Fenced => hand_over_fences(fences, tiling.blocks, from, to),
        Users::Several if giver.fences.is_empty() && state == taker.state => {}
        Users::Several => hand_over(fences, tiling.blocks, (from, state), to),
    }
    tiling.vacate(from);
}

/// As [`hand_over`], where both blocks are the same stream's: there are only fences to hand over.
#[cold]
#[inline(never)]
fn hand_over_fences(table: &mut FenceTable, blocks: &mut [Block], from: Slot, to: Slot) {
    let fences = table.union(blocks[to as usize].fences, blocks[from as usize].fences);
    blocks[to as usize].fences = fences;
}

#[cold]
#[inline(never)]
fn hand_over(table: &mut FenceTable, blocks: &mut [Block], (from, state): (Slot, BlockState), to: Slot) {
    let (giver, taker) = (&blocks[from as usize], &blocks[to as usize]);
    let (BlockState::Free { stream: other, since: other_since }, BlockState::Free { stream, since }) =
        (state, taker.state)
    else {
        unreachable!("only free blocks are merged");
    };
    let mut fences = table.union(taker.fences, giver.fences);
    let state = if stream == other {
        BlockState::Free { stream, since: since.max(other_since) }
    } else if since == 0 {
        // Memory that nobody used yet takes over its neighbour's owner.
        BlockState::Free { stream: other, since: other_since }
    } else {
        if other_since != 0 {
            fences = table.add(fences, Fence { stream: other, tick: other_since, event: None });
        }
        BlockState::Free { stream, since }
    };
    let taker = &mut blocks[to as usize];
    (taker.fences, taker.state) = (fences, state);
}
