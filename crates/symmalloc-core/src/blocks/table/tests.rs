//! Unit tests of `blocks/table.rs`.

use super::*;
use crate::history::digest::unpack_placement;

#[test]
fn a_block_takes_one_cache_line() {
    assert_eq!(size_of::<Block>(), 64);
}

#[test]
fn a_location_is_the_word_that_enters_digests() {
    let location = Location::new(SegmentId(7), 5).plus(3);
    assert_eq!((location.sequence(), location.offset()), (SegmentId(7), 8));
    assert_eq!(unpack_placement(location.word()), location.placement());
    assert!(location < location.plus(1) && location.plus(1) < Location::new(SegmentId(8), 0));
}
