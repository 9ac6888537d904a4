//! Tests of the `tracing` events, whose names and fields are stable.

use super::support::{Job, MIB};
use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use stub_process::nccl_test;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A subscriber that records the events of windows and communicators as `name field=value ...`.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Vec<String>>>);

impl Listener {
    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("the lock is not poisoned"))
    }
}

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").expect("writing to a string succeeds");
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let names = ["window.registered", "window.deregistered", "communicator.dropped", "sync.diverged", "sync.done"];
        metadata.target() == "symmalloc" && names.contains(&metadata.name())
    }
    fn event(&self, event: &Event<'_>) {
        let mut line = event.metadata().name().to_owned();
        event.record(&mut Fields(&mut line));
        self.0.lock().expect("the lock is not poisoned").push(line);
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

nccl_test!(windows_and_communicators_are_traced_with_stable_names_and_fields, {
    Job::new(2).quiet().run(|it| {
        let listener = Listener::default();
        let _guard = tracing::subscriber::set_default(listener.clone());
        let other = it.world.split(Some(0), 0).expect("all ranks should split").expect("the rank should be in a part");
        let pool = it.pool();
        it.registrar.attach(&other, &[pool.id()], it.windows()).expect("symmetric");
        let tensor = it.take(&pool, 30 * MIB);
        it.registrar.sync(&[&other]).expect("the ranks should agree");
        let window = "communicator=\"world/1.0\" symmetric_pool=0 stream=0 segment=0 size_bytes=31457280";
        let done = |counts: &str| format!("sync.done communicator=\"world/1.0\" {counts}");
        let registered = done("registrations=1 deregistrations=0 released_bytes=0 rounds=1");
        assert_eq!(listener.heard(), [format!("window.registered {window}"), registered]);
        it.registrar.sync(&[&other]).expect("the ranks should agree");
        assert!(listener.heard().is_empty(), "a quiet sync emits no event");
        drop(tensor);
        it.trim(&pool);
        it.registrar.sync(&[&other]).expect("the ranks should agree");
        let deregistered = done("registrations=0 deregistrations=1 released_bytes=31457280 rounds=1");
        assert_eq!(listener.heard(), [format!("window.deregistered {window}"), deregistered]);

        let sizes = if it.rank == 0 { 1 } else { 2 };
        let _tensors: Vec<_> = (0..sizes).map(|_| it.take(&pool, 30 * MIB)).collect();
        it.registrar.sync(&[&other]).expect_err("they differ");
        let heard = listener.heard();
        assert!(heard[0].starts_with("sync.diverged communicator=\"world/1.0\" rank="), "{heard:?}");
        other.abort().expect("the abort ends in time");
        it.registrar.sweep();
        let dropped = "communicator.dropped communicator=\"world/1.0\" state=aborted windows=0";
        assert_eq!(listener.heard(), [dropped]);
    });
});
