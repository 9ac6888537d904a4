//! Unit tests of `history/journal.rs`.

use super::*;
use crate::history::digest::op_word;
use crate::types::ids::StreamId;

fn journal(history_ops: u32) -> (Journal, Digest) {
    let digest = Digest { ops: 0, value: 7 };
    (Journal::new(history_ops, digest, Arc::new(ProgramOrder::new(true))), digest)
}

/// Folds and notes an op.
fn note(journal: &mut Journal, digest: &mut Digest, op: u64) {
    digest.fold(op, 1);
    journal.note(op, 1, *digest);
}

/// Asserts that the journal knows all ops from `oldest` on and none before. `all` holds the digests of all ops; every third
/// op has no name.
fn assert_knows_from(journal: &Journal, oldest: u64, all: &[Digest]) {
    let ops = all.len() as u64 - 1;
    assert_eq!((journal.ops(), journal.oldest()), (ops, oldest));
    for (at, digest) in (0..).zip(all) {
        let is_known = (oldest..ops).contains(&at);
        assert_eq!(journal.digest_at(at), (at >= oldest).then_some(digest.value));
        assert_eq!(journal.entry(at).map(|entry| entry.op), is_known.then_some(at));
        let name = (is_known && at % 3 > 0).then(|| at.to_string());
        assert_eq!(journal.name_of(at), name.as_deref(), "op {at} of {oldest}..{ops}");
    }
    assert!(journal.checkpoints().all(|checkpoint| all[checkpoint.ops as usize] == checkpoint));
}

#[test]
fn a_bounded_journal_answers_for_its_last_ops_like_an_unbounded_one() {
    let (mut short, mut digest) = journal(10);
    let mut all = vec![digest];
    for op in 0..1000_u64 {
        note(&mut short, &mut digest, op);
        if op % 3 > 0 {
            short.name_newest(&op.to_string());
        }
        all.push(digest);
        assert_knows_from(&short, (op + 1).saturating_sub(10), &all);
    }
    for agreed in 991..=1000 {
        short.agree(all[agreed]);
        assert_knows_from(&short, agreed as u64, &all);
    }
}

#[test]
fn checkpoints_are_few_and_at_the_same_ops_for_any_history_length() {
    let (mut one, mut digest) = journal(16);
    let (mut other, mut other_digest) = journal(100);
    for op in 0..100_000 {
        note(&mut one, &mut digest, op);
        note(&mut other, &mut other_digest, op);
    }
    let kept: Vec<Digest> = one.checkpoints().collect();
    assert!(kept.len() <= CHECKPOINTS_MAX + 2, "{}", kept.len());
    assert_eq!(kept[0].ops, 0, "the checkpoint of the last agreement is always kept");
    let widest = kept.windows(2).map(|pair| pair[1].ops - pair[0].ops).max().expect("several");
    assert!(widest <= 2 * 100_000 / (CHECKPOINTS_MAX as u64 / 2), "{widest}");
    let shared = other.checkpoints().filter(|checkpoint| kept.contains(checkpoint)).count();
    assert!(shared >= CHECKPOINTS_MAX / 2, "{shared}");
}

#[test]
fn after_an_agreement_an_old_rank_and_a_new_rank_have_equal_checkpoints() {
    let (mut old, mut digest) = journal(16);
    for ops in [10_000, 100_000, 50, 5000] {
        for op in 0..ops {
            note(&mut old, &mut digest, op);
        }
        old.agree(digest);
        let (mut joined, _) = journal(16);
        joined.begin(digest);
        let (mut one, mut other) = (digest, digest);
        for op in 0..5000 {
            note(&mut old, &mut one, op);
            note(&mut joined, &mut other, op);
            assert!(old.checkpoints().eq(joined.checkpoints()), "{op} ops after the agreement at {}", digest.ops);
        }
        digest = one;
    }
}

#[test]
fn an_agreement_empties_the_journal_and_its_memory_is_bounded() {
    let (mut journal, mut digest) = journal(500);
    let name = "ü".repeat(100);
    for op in 0..3000 {
        note(&mut journal, &mut digest, op_word(Mark::Allocate, StreamId(0), op));
        journal.name_allocation(1, &name);
    }
    assert!(journal.name_of(2999).is_some_and(|kept| kept.len() == 64 && name.starts_with(kept)));
    assert!(journal.bytes() <= 500 * (32 + 112) + 16 * 64, "{}", journal.bytes());
    journal.agree(digest);
    assert_eq!((journal.oldest(), journal.ops()), (3000, 3000));
    assert_eq!(journal.checkpoints().collect::<Vec<_>>(), [digest]);
    assert_eq!(journal.name_of(2999), None);
    journal.close();
    assert!(journal.bytes() <= 16 * 64, "{}", journal.bytes());
}
