//! The example of two models that take turns, on the stubs.

#[path = "../../examples/take_turns/model.rs"]
mod model;

use crate::registrar::support::Job;
use model::{Model, Passes, Size, allocator_for};
use stub_process::cuda::live;
use stub_process::{is_night, nccl, nccl_test};
use symmalloc_nccl::Registrar;

nccl_test!(two_models_take_turns_and_every_answer_is_correct, ["STUB_NCCL_REUSE_WINDOWS" = "1"], {
    let (counts, turns) = if is_night() { (&[1, 2, 4][..], 6) } else { (&[1, 2][..], 4) };
    for &ranks in counts {
        Job::new(ranks).run(|it| {
            let (device, world) = (&it.device, &it.world);
            let size = Size::with_weights(8 << 20, 6);
            let allocator = allocator_for(device, size).expect("the allocator is created");
            let registrar = Registrar::builder(&allocator).build().expect("the build should succeed");
            let load = |seed, passes| Model::load(&allocator, &registrar, world, size, (seed, passes));
            let mut captured = load(3, Passes::Captured).expect("the device has enough memory");
            let first = captured.answer(0).expect("the answer is correct");
            drop(captured);
            registrar.sync(&[world]).expect("the ranks should agree");
            allocator.trim_all().expect("the driver releases the memory");
            let mut models = Vec::new();
            for seed in [3, 5] {
                let mut model = load(seed, Passes::Submitted).expect("the device has enough memory");
                model.sleep().expect("all ranks should sleep together");
                models.push(model);
            }
            let mut answers = Vec::new();
            for turn in 0..turns {
                let model = &mut models[turn % 2];
                model.wake().expect("the other model sleeps");
                // The same two prompts alternate.
                answers.push(model.answer(turn as u32 % 2).expect("the answer is correct"));
                model.sleep().expect("all ranks should sleep together");
            }
            assert!(
                answers[0] == first
                    && answers[0] == answers[2]
                    && answers[1] == answers[turns - 1]
                    && answers[0] != answers[1],
                "{answers:?}"
            );
            models[0].wake().expect("the other model sleeps");
            assert!(models[1].wake().is_err(), "the device has no memory for both models");
            models[0].sleep().expect("all ranks should sleep together");
            models.into_iter().try_for_each(Model::end).expect("nothing is left");
        });
    }
    nccl::assert_clean();
    assert_eq!(live().device_bytes, 0);
});
