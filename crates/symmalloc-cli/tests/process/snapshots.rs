//! Snapshots of a small model of PyTorch's allocator, which knows the right answers: what was live, reserved and free, and where, when a
//! request failed. Seeds vary pools, streams, devices, sizes, the part of the history that is kept, frames, compression and order.

use crate::{Folder, symmalloc};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use symmalloc_sim::SplitMix64;

const MIB: u64 = 1 << 20;

/// A value of a pickle.
enum Item {
    Number(u64),
    Text(&'static str),
    Flag(bool),
    Pair(u64, u64),
    List(Vec<Item>),
    Dict(Vec<(&'static str, Item)>),
}

impl Item {
    fn write(&self, out: &mut Vec<u8>) {
        let text = |text: &str, out: &mut Vec<u8>| {
            out.extend([0x8c, text.len() as u8]);
            out.extend(text.as_bytes());
        };
        let number = |number: u64, out: &mut Vec<u8>| {
            out.extend([0x8a, 9]);
            out.extend(number.to_le_bytes());
            out.push(0);
        };
        match self {
            Item::Number(value) => number(*value, out),
            Item::Text(value) => text(value, out),
            Item::Flag(value) => out.push(if *value { 0x88 } else { 0x89 }),
            Item::Pair(first, second) => {
                number(*first, out);
                number(*second, out);
                out.push(0x86);
            }
            Item::List(items) => {
                out.extend(b"](");
                items.iter().for_each(|item| item.write(out));
                out.push(b'e');
            }
            Item::Dict(fields) => {
                out.extend(b"}(");
                for (key, value) in fields {
                    text(key, out);
                    value.write(out);
                }
                out.push(b'u');
            }
        }
    }
}

/// Frames of a request, innermost first. The program's is `proj/model.py:40 forward`.
fn frames(style: u64) -> Item {
    let frame = |name, filename, line| {
        Item::Dict(vec![("name", Item::Text(name)), ("filename", Item::Text(filename)), ("line", Item::Number(line))])
    };
    Item::List(match style {
        0 => vec![
            frame("_call_impl", "/usr/lib/python3/site-packages/torch/nn/modules/module.py", 1),
            frame("forward", "/home/u/proj/model.py", 40),
        ],
        1 => vec![
            frame("_call_impl", "C:\\Users\\u\\venv\\Lib\\site-packages\\torch\\nn\\modules\\module.py", 1),
            frame("forward", "C:\\Users\\u\\proj\\model.py", 40),
        ],
        2 => vec![frame("forward", "/home/u/torch/proj/model.py", 40)],
        _ => Vec::new(),
    })
}

type Heap = ((u64, u64), u64);

/// A segment with its used blocks: by address, the bytes of the block and those requested.
struct Segment {
    address: u64,
    bytes: u64,
    heap: Heap,
    used: BTreeMap<u64, (u64, u64)>,
}

impl Segment {
    fn free_bytes(&self) -> u64 {
        self.bytes - self.used.values().map(|(block, _)| block).sum::<u64>()
    }
}

/// The right answer about a failed request.
#[derive(Debug)]
struct Failed {
    size: u64,
    live: u64,
    reserved: u64,
    free: u64,
    device_free: u64,
    /// Reserved and free bytes of each heap, in ascending order.
    heaps: Vec<[u64; 2]>,
}

/// A model of PyTorch's allocator: fixed segments, first fit, and free segments go back to the device before a request fails.
struct Model {
    segments: Vec<Segment>,
    entries: Vec<Item>,
    style: u64,
    capacity: u64,
    next: u64,
    failed: Option<Failed>,
}

impl Model {
    fn of(random: &mut SplitMix64) -> Self {
        let capacity = [30, 100, 300, 3000][random.below(4) as usize] * MIB;
        let mut model = Model {
            segments: Vec::new(),
            entries: Vec::new(),
            style: random.below(4),
            capacity,
            next: 0x7f00_0000_0000,
            failed: None,
        };
        let pools: Vec<(u64, u64)> =
            (0..1 + random.below(4)).map(|pool| if pool % 2 == 0 { (0, pool) } else { (pool, 0) }).collect();
        let streams: Vec<u64> = (0..1 + random.below(3)).map(|stream| stream * 0x5581_0010).collect();
        let failures = 1 + random.below(3);
        let mut so_far = 0;
        for _ in 0..[1, 2, 60, 400][random.below(4) as usize] {
            let live: Vec<u64> = model.segments.iter().flat_map(|segment| segment.used.keys().copied()).collect();
            if !live.is_empty() && random.below(10) < 4 {
                model.free(live[random.below(live.len() as u64) as usize]);
                continue;
            }
            let unit = [512, MIB, 3 * MIB, 10 * MIB, 25 * MIB][random.below(5) as usize];
            let size = unit * (1 + random.below(3)) - 100 * random.below(2);
            let heap = (
                pools[random.below(pools.len() as u64) as usize],
                streams[random.below(streams.len() as u64) as usize],
            );
            so_far += u64::from(!model.allocate(size, heap));
            if so_far == failures {
                break;
            }
        }
        model
    }

    fn entry(&mut self, action: &'static str, address: u64, size: u64, (_, stream): Heap) {
        let key = if action == "oom" { "device_free" } else { "addr" };
        let frames = if matches!(action, "alloc" | "oom") { frames(self.style) } else { Item::List(Vec::new()) };
        self.entries.push(Item::Dict(vec![
            ("action", Item::Text(action)),
            (key, Item::Number(address)),
            ("size", Item::Number(size)),
            ("stream", Item::Number(stream)),
            ("frames", frames),
        ]));
    }

    fn reserved(&self) -> u64 {
        self.segments.iter().map(|segment| segment.bytes).sum()
    }

    /// Returns `false` if the request fails.
    fn allocate(&mut self, size: u64, heap: Heap) -> bool {
        let block = size.next_multiple_of(512);
        let place = self.segments.iter().enumerate().filter(|(_, segment)| segment.heap == heap).find_map(
            |(index, segment)| {
                let mut at = segment.address;
                for (address, (bytes, _)) in &segment.used {
                    if address - at >= block {
                        return Some((index, at));
                    }
                    at = address + bytes;
                }
                (segment.address + segment.bytes - at >= block).then_some((index, at))
            },
        );
        let (index, address) = match place {
            Some(place) => place,
            None => {
                let least = if block <= MIB { 2 * MIB } else { 20 * MIB };
                let bytes = block.max(least).next_multiple_of(2 * MIB);
                if self.reserved() + bytes > self.capacity {
                    for index in (0..self.segments.len()).rev() {
                        if self.segments[index].used.is_empty() {
                            let segment = self.segments.remove(index);
                            self.entry("segment_free", segment.address, segment.bytes, segment.heap);
                        }
                    }
                }
                if self.reserved() + bytes > self.capacity {
                    self.fail(size, heap);
                    return false;
                }
                let address = self.next;
                self.next += bytes + 2 * MIB;
                self.segments.push(Segment { address, bytes, heap, used: BTreeMap::new() });
                self.entry("segment_alloc", address, bytes, heap);
                (self.segments.len() - 1, address)
            }
        };
        self.segments[index].used.insert(address, (block, size));
        self.entry("alloc", address, size, heap);
        true
    }

    fn fail(&mut self, size: u64, heap: Heap) {
        let mut heaps: BTreeMap<Heap, [u64; 2]> = BTreeMap::new();
        for segment in &self.segments {
            let [reserved, free] = heaps.entry(segment.heap).or_default();
            (*reserved, *free) = (*reserved + segment.bytes, *free + segment.free_bytes());
        }
        let reserved = self.reserved();
        let mut heaps: Vec<[u64; 2]> = heaps.into_values().collect();
        heaps.sort_unstable();
        let device_free = self.capacity - reserved;
        let free = self.segments.iter().map(Segment::free_bytes).sum();
        self.failed = Some(Failed { size, live: self.live(), reserved, free, device_free, heaps });
        self.entry("oom", device_free, size, heap);
    }

    fn live(&self) -> u64 {
        self.segments.iter().flat_map(|segment| segment.used.values()).map(|(_, size)| size).sum()
    }

    fn free(&mut self, address: u64) {
        let segment = self.segments.iter_mut().find(|segment| segment.used.contains_key(&address)).unwrap();
        let (_, size) = segment.used.remove(&address).unwrap();
        let heap = segment.heap;
        self.entry("free_requested", address, size, heap);
        self.entry("free_completed", address, size, heap);
    }

    /// Returns `segments` of a snapshot.
    fn state(&self, device: u64) -> Vec<Item> {
        let block = |address, bytes, requested, state, frames| {
            Item::Dict(vec![
                ("address", Item::Number(address)),
                ("size", Item::Number(bytes)),
                ("requested_size", Item::Number(requested)),
                ("state", Item::Text(state)),
                ("frames", frames),
            ])
        };
        let segment = |segment: &Segment| {
            let (mut blocks, mut at) = (Vec::new(), segment.address);
            let end = segment.address + segment.bytes;
            for (&address, &(bytes, size)) in segment.used.iter().chain([(&end, &(0, 0))]) {
                if address > at {
                    blocks.push(block(at, address - at, 0, "inactive", Item::List(Vec::new())));
                }
                if bytes > 0 {
                    blocks.push(block(address, bytes, size, "active_allocated", frames(self.style)));
                }
                at = address + bytes;
            }
            let ((first, second), stream) = segment.heap;
            Item::Dict(vec![
                ("device", Item::Number(device)),
                ("address", Item::Number(segment.address)),
                ("total_size", Item::Number(segment.bytes)),
                ("stream", Item::Number(stream)),
                ("segment_pool_id", Item::Pair(first, second)),
                ("is_expandable", Item::Flag(false)),
                ("blocks", Item::List(blocks)),
            ])
        };
        self.segments.iter().map(segment).collect()
    }
}

/// Writes a pickle, perhaps compressed, with bytes after its end as some file systems and tapes add them.
fn written(folder: &Folder, name: &str, root: &Item, random: &mut SplitMix64) -> std::path::PathBuf {
    let mut bytes = b"\x80\x04".to_vec();
    root.write(&mut bytes);
    bytes.push(b'.');
    if random.below(3) == 0 {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&bytes).unwrap();
        bytes = encoder.finish().unwrap();
        bytes.resize(bytes.len() + random.below(600) as usize, 0);
    }
    folder.file(name, bytes)
}

#[test]
fn failed_requests_are_described_as_they_were() {
    let folder = Folder::new();
    let (page, exported) = (folder.path("page.html"), folder.path("exported.pickle"));
    let mut failures = 0;
    for seed in 0..100 {
        let mut random = SplitMix64::new(seed);
        let mut model = Model::of(&mut random);
        let devices = 1 + random.below(2) * random.below(8);
        let device = random.below(devices);
        let mut state = model.state(device);
        if random.below(2) == 0 {
            state.reverse();
        }
        let mut entries = std::mem::take(&mut model.entries);
        let is_late = random.below(3) == 0 && entries.len() > 4;
        if is_late {
            entries.drain(..1 + random.below(entries.len() as u64 / 2) as usize);
        }
        let is_oom = |entry: &Item| matches!(entry, Item::Dict(fields) if matches!(fields[0].1, Item::Text("oom")));
        let failed = model.failed.as_ref().filter(|_| entries.iter().any(is_oom));
        let mut entries = Some(entries);
        let traces = (0..devices).map(|of| Item::List(if of == device { entries.take().unwrap() } else { Vec::new() }));
        let root = Item::Dict(vec![("segments", Item::List(state)), ("device_traces", Item::List(traces.collect()))]);
        let snapshot = written(&folder, "job.pickle", &root, &mut random);
        let object = symmalloc("report {} -o {} --json", &[&snapshot, &page]).json(0);
        let failure = &object["failure"];
        let told = format!("seed {seed}, late {is_late}: {failed:?}\n{failure}");
        let Some(failed) = failed else {
            assert_eq!(*failure, Value::Null, "{told}");
            continue;
        };
        failures += 1;
        assert_eq!(
            (&failure["size_bytes"], &failure["live_bytes"]),
            (&json!(failed.size), &json!(failed.live)),
            "{told}"
        );
        let held = &failure["held"];
        let free = held["free_segment_bytes"].as_u64().unwrap() + held["free_block_bytes"].as_u64().unwrap();
        assert_eq!((held["reserved_bytes"].as_u64(), free), (Some(failed.reserved), failed.free), "{told}");
        assert_eq!(failure["device_free_bytes"], failed.device_free, "{told}");
        let mut heaps: Vec<[u64; 2]> = failure["heaps"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|heap| heap["reserved_bytes"].as_u64() > Some(0))
            .map(|heap| ["reserved_bytes", "free_bytes"].map(|key| heap[key].as_u64().unwrap()))
            .collect();
        heaps.sort_unstable();
        assert_eq!(heaps, failed.heaps, "{told}");
        let is_too_much = failed.live + failed.size > failed.reserved + failed.device_free;
        assert_eq!(failure["cause"], if is_too_much { "too much" } else { "fragmentation" }, "{told}");
        if model.style < 3 {
            assert!(failure["name"].as_str().unwrap().ends_with("proj/model.py:40 forward"), "{told}");
        }
        // PyTorch's tools see the same request in an export.
        symmalloc("export {} {}", &[&snapshot, &exported]).exited(0);
        let again = &symmalloc("report {} -o {} --json", &[&exported, &page]).json(0)["failure"];
        for key in ["size_bytes", "live_bytes", "device_free_bytes", "others"] {
            assert_eq!(again[key], failure[key], "seed {seed}: {key} of the export");
        }
    }
    assert!(failures > 20, "{failures}");
}

#[test]
fn states_without_history_are_described_as_they_are() {
    let folder = Folder::new();
    let page = folder.path("page.html");
    for seed in 0..40 {
        let mut random = SplitMix64::new(1000 + seed);
        let devices: Vec<Model> = (0..1 + random.below(3)).map(|_| Model::of(&mut random)).collect();
        let state = devices.iter().zip(0..).flat_map(|(model, device)| model.state(device)).collect();
        let no_trace = || Item::List(devices.iter().map(|_| Item::List(Vec::new())).collect());
        let root = match random.below(4) {
            0 => Item::List(state),
            1 => Item::Dict(vec![("segments", Item::List(state))]),
            2 => Item::Dict(vec![("segments", Item::List(state)), ("device_traces", Item::List(Vec::new()))]),
            _ => Item::Dict(vec![("device_traces", no_trace()), ("segments", Item::List(state))]),
        };
        let snapshot = written(&folder, "state.pickle", &root, &mut random);
        let live: Vec<usize> = (0..devices.len()).filter(|device| devices[*device].live() > 0).collect();
        for (number, device) in live.iter().enumerate() {
            let flag = if live.len() > 1 { format!(" --device {device}") } else { String::new() };
            let object = symmalloc(&format!("report {{}} -o {{}} --json{flag}"), &[&snapshot, &page]).json(0);
            let model = &devices[*device];
            let whole = model.segments.iter().filter(|segment| segment.used.is_empty()).map(|segment| segment.bytes);
            let state = &object["state"];
            let told = format!("seed {seed}, device {device} ({number}): {state}");
            assert_eq!(state["reserved_bytes"], model.reserved(), "{told}");
            assert_eq!(state["free_segment_bytes"], whole.clone().sum::<u64>(), "{told}");
            assert_eq!(state["free_segments"], whole.count(), "{told}");
            assert_eq!(object["lived_before_bytes"], model.live(), "{told}");
            assert_eq!(object["settings"].as_array().unwrap().len(), 1, "{told}");
        }
        if live.len() > 1 {
            let output = symmalloc("report {} -o {}", &[&snapshot, &page]);
            assert_eq!(output.code, Some(2));
            for device in live {
                assert!(output.stderr.contains(&format!("device {device}: no history and ")), "{}", output.stderr);
            }
        }
    }
}
