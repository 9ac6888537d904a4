//! Writer for Chrome trace events in JSON. The events are sorted by time, except for the names of processes, which have
//! no time.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};
use symmalloc_core::AllocationId;

/// Writes the JSON object `{"traceEvents":[..], ..}`.
pub(super) struct EventWriter<W> {
    sink: W,
    /// Separator before the next event.
    separator: &'static str,
}

/// Arguments of an event: the contents of a JSON object, without its braces.
#[derive(Debug, Default)]
pub(super) struct Args(String);

impl Args {
    pub(super) fn new() -> Self {
        Args::default()
    }

    pub(super) fn number(self, key: &str, number: u64) -> Self {
        self.field(key, format_args!("{number}"))
    }

    pub(super) fn address(self, key: &str, address: u64) -> Self {
        self.field(key, format_args!("\"{address:#x}\""))
    }

    fn field(mut self, key: &str, value: fmt::Arguments<'_>) -> Self {
        let comma = if self.0.is_empty() { "" } else { "," };
        write!(self.0, "{comma}\"{key}\":{value}").expect("writing to a string cannot fail");
        self
    }
}

impl<W: Write> EventWriter<W> {
    pub(super) fn new(mut sink: W) -> io::Result<Self> {
        sink.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
        Ok(EventWriter { sink, separator: "\n" })
    }

    /// Names a process, and sorts it after the processes with lower numbers.
    pub(super) fn process(&mut self, process: usize, name: &str) -> io::Result<()> {
        let name = Text(name);
        self.event(format_args!(r#""ph":"M","pid":{process},"name":"process_name","args":{{"name":{name}}}"#))?;
        self.event(format_args!(
            r#""ph":"M","pid":{process},"name":"process_sort_index","args":{{"sort_index":{process}}}"#
        ))
    }

    pub(super) fn counter(&mut self, name: &str, process: usize, at: usize, bytes: u64) -> io::Result<()> {
        self.event(format_args!(r#""ph":"C","pid":{process},"ts":{at},"name":"{name}","args":{{"bytes":{bytes}}}"#))
    }

    pub(super) fn instant(&mut self, name: &str, process: usize, at: usize, args: &Args) -> io::Result<()> {
        let Args(args) = args;
        self.event(format_args!(
            r#""ph":"i","s":"p","pid":{process},"tid":{process},"ts":{at},"name":"{name}","args":{{{args}}}"#
        ))
    }

    pub(super) fn begin_slice(
        &mut self,
        name: &str,
        id: AllocationId,
        process: usize,
        at: usize,
        args: &Args,
    ) -> io::Result<()> {
        let (name, id, Args(args)) = (Text(name), id.0, args);
        self.event(format_args!(
            r#""ph":"b","cat":"allocation","id2":{{"local":"{id:#x}"}},"pid":{process},"tid":{process},"ts":{at},"name":{name},"args":{{{args}}}"#
        ))
    }

    pub(super) fn end_slice(&mut self, name: &str, id: AllocationId, process: usize, at: usize) -> io::Result<()> {
        let (name, id) = (Text(name), id.0);
        self.event(format_args!(
            r#""ph":"e","cat":"allocation","id2":{{"local":"{id:#x}"}},"pid":{process},"tid":{process},"ts":{at},"name":{name}"#
        ))
    }

    fn event(&mut self, fields: fmt::Arguments<'_>) -> io::Result<()> {
        write!(self.sink, "{}{{{fields}}}", self.separator)?;
        self.separator = ",\n";
        Ok(())
    }

    pub(super) fn finish(mut self, ops_per_point: u64) -> io::Result<()> {
        writeln!(
            self.sink,
            "\n],\"otherData\":{{\"producer\":\"symmalloc\",\"microsecond\":\"op\",\"ops_per_point\":\"{ops_per_point}\"}}}}"
        )?;
        self.sink.flush()
    }
}

/// A JSON string.
struct Text<'a>(&'a str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                '\n' => f.write_str("\\n")?,
                c if c < ' ' => write!(f, "\\u{:04x}", u32::from(c))?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}
