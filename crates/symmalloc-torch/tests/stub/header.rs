//! The functions of the header, parsed from it and called by address. A test of all functions covers new ones without a change.

use crate::library::*;
use std::ffi::CStr;
use std::path::Path;
use symmalloc_torch::*;

/// A call by integer arguments, for all arguments except floating-point ones. The function ignores extra arguments.
type Call = unsafe extern "C-unwind" fn(usize, usize, usize, usize, usize, usize, usize, usize, usize) -> usize;
const ARGUMENTS_MAX: usize = 9;

/// The kind of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Number,
    /// A floating-point number, which uses no integer register.
    Real,
    Allocator,
    Text,
    Callback,
    /// An object that only the library creates.
    Object,
    /// A stream, a device pointer or a callback's context: NULL is valid.
    Handle,
    /// An output pointer, or a struct.
    Place,
}

pub(crate) struct Function {
    pub(crate) name: String,
    /// The documentation.
    pub(crate) text: String,
    pub(crate) has_status: bool,
    pub(crate) arguments: Vec<(String, Kind)>,
}

impl Kind {
    fn of(argument: &str) -> Kind {
        let objects =
            ["registrar *", "all_to_all *", "announcement *", "checkpoint *", "opened *", "source *", "dma_buf *"];
        let is_place = argument.contains("**");
        match argument {
            "void" => unreachable!("no argument"),
            text if text.starts_with("double") => Kind::Real,
            text if text.contains("_fn ") => Kind::Callback,
            text if !text.contains('*') => Kind::Number,
            text if !is_place && text.contains("symmalloc_allocator *") => Kind::Allocator,
            text if !is_place && objects.iter().any(|object| text.contains(object)) => Kind::Object,
            text if !is_place && text.contains("const char *") => Kind::Text,
            text if !is_place && text.contains("void *") => Kind::Handle,
            _ => Kind::Place,
        }
    }
}

/// Parses the functions of the header.
pub(crate) fn functions() -> Vec<Function> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/symmalloc.h");
    let header = std::fs::read_to_string(path).expect("the header");
    let (_, header) = header.split_once("extern \"C\" {").expect("the functions");
    let mut functions = Vec::new();
    let mut text = String::new();
    for part in header.split("/**").skip(1) {
        let (comment, code) = part.split_once("*/").expect("a comment ends");
        text.clear();
        text.push_str(comment);
        let Some((declaration, _)) = code.split_once(';') else { continue };
        let Some((head, arguments)) = declaration.split_once('(') else { continue };
        let arguments = arguments.trim_end().trim_end_matches(')');
        let named = arguments.split(',').map(|argument| argument.split_whitespace().collect::<Vec<_>>().join(" "));
        let arguments = named.filter(|argument| argument != "void").map(|argument| {
            let name = argument.rsplit([' ', '*']).next().expect("a name").to_owned();
            (name, Kind::of(&argument))
        });
        let name = head.trim().rsplit([' ', '*']).next().expect("a name").to_owned();
        functions.push(Function {
            name,
            text: text.clone(),
            has_status: head.trim().starts_with("symmalloc_status"),
            arguments: arguments.collect(),
        });
    }
    functions
}

/// Returns the address of a function by its name.
fn address(name: &str) -> Option<usize> {
    macro_rules! table {
        ($($function:ident),* $(,)?) => {
            match name {
                $(stringify!($function) => Some($function as *const () as usize),)*
                _ => None,
            }
        };
    }
    table![
        symmalloc_error_message,
        symmalloc_version,
        symmalloc_create,
        symmalloc_destroy,
        symmalloc_allocate,
        symmalloc_allocate_named,
        symmalloc_free,
        symmalloc_record_use,
        symmalloc_register_stream,
        symmalloc_register_stream_in,
        symmalloc_allocate_unordered,
        symmalloc_free_unordered,
        symmalloc_free_on,
        symmalloc_ort_use_stream,
        symmalloc_ort_alloc,
        symmalloc_ort_free,
        symmalloc_ort_empty_cache,
        symmalloc_pool_create,
        symmalloc_pool_create_with_key,
        symmalloc_pool_destroy,
        symmalloc_pool_reset,
        symmalloc_reserve,
        symmalloc_trim,
        symmalloc_trim_private,
        symmalloc_grant_access,
        symmalloc_sleep,
        symmalloc_sleep_and_suspend,
        symmalloc_suspend,
        symmalloc_device_memory,
        symmalloc_wake,
        symmalloc_save_in,
        symmalloc_retain_saved,
        symmalloc_saved_pointer,
        symmalloc_saved_copy,
        symmalloc_sleep_tagged,
        symmalloc_wake_tagged,
        symmalloc_phase,
        symmalloc_resize,
        symmalloc_reserve_host_memory,
        symmalloc_release_host_memory,
        symmalloc_dma_buf_open,
        symmalloc_dma_buf_is_current,
        symmalloc_dma_buf_close,
        symmalloc_step_begin,
        symmalloc_step_end,
        symmalloc_plans_adopt,
        symmalloc_plans_drop,
        symmalloc_placement_of,
        symmalloc_stats_json,
        symmalloc_reset_peaks,
        symmalloc_digest,
        symmalloc_snapshot,
        symmalloc_check_memory,
        symmalloc_explain_address,
        symmalloc_memory_record,
        symmalloc_leak_report,
        symmalloc_config,
        symmalloc_release_bytes,
        symmalloc_trace_start,
        symmalloc_trace_stop,
        symmalloc_registrar_create,
        symmalloc_registrar_create_with,
        symmalloc_registrar_sync,
        symmalloc_registrar_agree,
        symmalloc_registrar_rank,
        symmalloc_registrar_window,
        symmalloc_registrar_destroy,
        symmalloc_pool_sync,
        symmalloc_pool_agree,
        symmalloc_scope_begin,
        symmalloc_scope_end,
        symmalloc_all_to_all_create,
        symmalloc_all_to_all_exchange,
        symmalloc_all_to_all_run,
        symmalloc_all_to_all_destroy,
        symmalloc_agree,
        symmalloc_agree_all,
        symmalloc_announce_begin,
        symmalloc_announce_end,
        symmalloc_flight_record,
        symmalloc_torch_base_alloc,
        symmalloc_torch_configure,
        symmalloc_process_allocator,
        symmalloc_torch_push_pool,
        symmalloc_torch_pop_pool,
        symmalloc_torch_push_name,
        symmalloc_torch_pop_name,
        symmalloc_torch_allocate,
        symmalloc_torch_allocate_with_address,
        symmalloc_torch_has_captured,
        symmalloc_torch_is_forked,
        symmalloc_torch_deallocate,
        symmalloc_torch_find,
        symmalloc_torch_device_of,
        symmalloc_torch_record_use,
        symmalloc_torch_trim,
        symmalloc_torch_largest_block,
        symmalloc_torch_set_fraction,
        symmalloc_torch_enable_peer,
        symmalloc_torch_check,
        symmalloc_torch_settings,
        symmalloc_torch_properties,
        symmalloc_torch_begin_scope,
        symmalloc_torch_end_scope,
        symmalloc_torch_retain_pool,
        symmalloc_torch_release_use,
        symmalloc_torch_pool_uses,
        symmalloc_torch_pool_helps_out,
        symmalloc_torch_pool_unsplit,
        symmalloc_torch_counts,
        symmalloc_torch_reset_peaks,
        symmalloc_torch_visit,
        symmalloc_torch_checkpoint,
        symmalloc_torch_checkpoint_destroy,
        symmalloc_torch_restore,
        symmalloc_torch_on_memory,
        symmalloc_torch_share,
        symmalloc_torch_open,
        symmalloc_torch_close,
    ]
}

extern "C" fn answer_zero() -> usize {
    0
}

/// Calls a function with these arguments, and returns its result.
pub(crate) fn call(function: &Function, values: &[usize]) -> usize {
    let address = address(&function.name).unwrap_or_else(|| panic!("add {} to the table", function.name));
    let mut integers = [0; ARGUMENTS_MAX];
    let taken = values.iter().zip(&function.arguments).filter(|(_, (_, kind))| *kind != Kind::Real);
    taken.zip(&mut integers).for_each(|((value, _), place)| *place = *value);
    println!("{}({values:x?})", function.name);
    let [a, b, c, d, e, f, g, h, i] = integers;
    // SAFETY: integers and pointers are passed in the same registers, and extra ones are ignored. The values are valid for the
    // function, or NULL, which is what the test examines.
    unsafe { std::mem::transmute::<usize, Call>(address)(a, b, c, d, e, f, g, h, i) }
}

/// Returns a valid value for an argument; `None` if only the library creates one.
pub(crate) fn valid((name, kind): &(String, Kind), allocator: Allocator) -> Option<usize> {
    static PATH: &CStr = c"/nowhere/x";
    static SETTINGS: &CStr = c"";
    match kind {
        Kind::Text if name.starts_with("conf") => Some(SETTINGS.as_ptr() as usize),
        Kind::Number | Kind::Real | Kind::Handle => Some(0),
        Kind::Allocator => Some(allocator.0 as usize),
        Kind::Text => Some(PATH.as_ptr() as usize),
        Kind::Callback => Some(answer_zero as *const () as usize),
        Kind::Object => None,
        // The function may keep the pointer.
        Kind::Place => Some(Box::leak(Box::new([0_u64; 512])).as_ptr() as usize),
    }
}

#[test]
fn every_function_of_the_header_is_parsed() {
    let functions = functions();
    assert!(functions.len() > 90, "{}", functions.len());
    let create = functions.iter().find(|function| function.name == "symmalloc_create").expect("declared");
    let kinds: Vec<_> = create.arguments.iter().map(|(_, kind)| *kind).collect();
    assert_eq!((kinds, create.has_status), (vec![Kind::Number, Kind::Text, Kind::Place], true));
    assert!(functions.iter().all(|function| function.arguments.len() <= ARGUMENTS_MAX));
    functions
        .iter()
        .for_each(|function| assert!(address(&function.name).is_some(), "add {} to the table", function.name));
}
