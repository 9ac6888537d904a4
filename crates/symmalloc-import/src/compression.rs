//! Compression: the layer between a file and the text or pickle in it.
//!
//! Readers detect the compression from the first bytes rather than from the name, because users rename files, and pipes have no name.
//! Writers choose the compression by the file's extension.
//!
//! ```text
//! 1f 8b         gzip (one member or several, concatenated; other data after them is ignored)
//! 28 b5 2f fd   zstd (one frame or several)
//! other         plain
//! ```
//!
//! If compressed data ends early, `Read` returns an [`io::Error`] that wraps [`CompressionError::Torn`]; [`CompressionError::of`] extracts
//! it. Data that grows more than a thousandfold is rejected as [`CompressionError::Bomb`]: no recording grows so much, and without this
//! check, a few kilobytes could keep a reader busy for minutes.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Chain, Cursor, Read, Write};
use std::path::Path;

use symmalloc_core::units::Amount;

use crate::options::CompressedBytes;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Higher levels make a trace 15 % smaller and take 50 times as long.
const ZSTD_LEVEL: i32 = 9;
/// The highest level makes a trace 8 % smaller and takes twice as long.
const GZIP_LEVEL: u32 = 6;
/// Level for files that are written while a program runs. Traces are a fifth larger, and compress five times as fast.
const ZSTD_LEVEL_BESIDE_A_PROGRAM: i32 = 1;
const GZIP_LEVEL_BESIDE_A_PROGRAM: u32 = 1;
const BUFFER_BYTES: usize = 64 << 10;
/// Number of decompressed bytes that are always allowed.
const UNSUSPICIOUS_BYTES: u64 = 64 << 20;
/// Maximum growth factor of data that exceeds `UNSUSPICIOUS_BYTES`. Recordings grow by a factor of 10 to 100.
const GROWTH_MAX: u64 = 1000;

/// The compression of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Compression {
    /// No compression.
    #[default]
    Plain,
    /// gzip (RFC 1952).
    Gzip,
    /// Zstandard (RFC 8878).
    Zstd,
}

impl Compression {
    /// Returns the compression of data that starts with `start`. Four bytes suffice.
    pub fn of_content(start: &[u8]) -> Self {
        if start.starts_with(&GZIP_MAGIC) {
            Compression::Gzip
        } else if start.starts_with(&ZSTD_MAGIC) {
            Compression::Zstd
        } else {
            Compression::Plain
        }
    }

    /// Returns the compression for a file with this name: gzip for `.gz`, zstd for `.zst`, and plain for every other
    /// name.
    pub fn of_extension(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Compression::Gzip,
            Some("zst") => Compression::Zstd,
            _ => Compression::Plain,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Plain => "plain",
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        })
    }
}

/// Error decompressing data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CompressionError {
    /// The data ends before the compressed stream does: the file is truncated, or is still being written.
    #[error(
        "the {compression} data ends early, after {} of decompressed data: copy the file again, or wait until it is written",
        Amount(*decompressed_bytes)
    )]
    Torn {
        /// The compression.
        compression: Compression,
        /// Number of decompressed bytes before the end.
        decompressed_bytes: u64,
    },
    /// The data is not valid for the compression that its first bytes indicate.
    #[error(
        "the {compression} data is damaged after {} of decompressed data: copy the file again",
        Amount(*decompressed_bytes)
    )]
    Corrupt {
        /// The compression.
        compression: Compression,
        /// Number of decompressed bytes before the damage.
        decompressed_bytes: u64,
    },
    /// The data grows more than any recording does when it is decompressed.
    #[error(
        "{} of {compression} data grow to more than {}: no recording does that; if this is one, decompress it yourself",
        Amount(*compressed_bytes),
        Amount(*decompressed_bytes)
    )]
    Bomb {
        /// The compression.
        compression: Compression,
        /// Number of compressed bytes read.
        compressed_bytes: u64,
        /// Number of bytes that were decompressed from them.
        decompressed_bytes: u64,
    },
}

impl CompressionError {
    /// Returns the compression error that an I/O error of [`Decompressor`] wraps, if there is one.
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref::<Self>().copied()
    }
}

/// Returns `true` if an I/O error means that the compressed data ends early.
pub(crate) fn is_torn(error: &io::Error) -> bool {
    matches!(CompressionError::of(error), Some(CompressionError::Torn { .. }))
}

/// A source whose first bytes were inspected: returns these bytes again, and then the rest.
type Source<R> = BufReader<Chain<Cursor<Vec<u8>>, Counted<R>>>;

/// A source that counts the bytes read from it.
struct Counted<R> {
    source: R,
    bytes: CompressedBytes,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.source.read(buffer)?;
        self.bytes.add(bytes as u64);
        Ok(bytes)
    }
}

enum Decoder<R: Read> {
    Plain(Source<R>),
    Gzip(Box<Members<Source<R>>>),
    Zstd(zstd::stream::read::Decoder<'static, Source<R>>),
}

/// The members of gzip data, one after the other. Data after a member that is not another member is ignored, as `gzip` does: for example,
/// zeros that fill the last block of a tape, or bytes that a program appended.
struct Members<S> {
    /// The current member; `None` after the last one.
    member: Option<flate2::bufread::GzDecoder<Pushed<S>>>,
    rest: Option<Pushed<S>>,
}

impl<S: BufRead> Members<S> {
    fn new(source: S) -> Self {
        let member = flate2::bufread::GzDecoder::new(Pushed { pushed: Vec::new(), source });
        Members { member: Some(member), rest: None }
    }

    /// Starts the next member, if the source continues with one.
    fn next_member(&mut self) -> io::Result<()> {
        let Some(member) = self.member.take() else { return Ok(()) };
        let mut source = member.into_inner();
        let mut start = Vec::with_capacity(GZIP_MAGIC.len());
        let peeked = source.by_ref().take(GZIP_MAGIC.len() as u64).read_to_end(&mut start);
        if peeked.is_ok() && start == GZIP_MAGIC {
            source.pushed = start;
            self.member = Some(flate2::bufread::GzDecoder::new(source));
        } else {
            self.rest = Some(source);
        }
        peeked.map(drop)
    }
}

impl<S: BufRead> Read for Members<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            match member.read(buffer)? {
                0 if !buffer.is_empty() => self.next_member()?,
                bytes => return Ok(bytes),
            }
        }
        Ok(0)
    }
}

/// A source, preceded by bytes that were read from it too early.
struct Pushed<S> {
    pushed: Vec<u8>,
    source: S,
}

impl<S: BufRead> BufRead for Pushed<S> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.pushed.is_empty() { self.source.fill_buf() } else { Ok(&self.pushed) }
    }

    fn consume(&mut self, bytes: usize) {
        if self.pushed.is_empty() {
            self.source.consume(bytes);
        } else {
            self.pushed.drain(..bytes);
        }
    }
}

impl<S: BufRead> Read for Pushed<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.fill_buf()?.read(buffer)?;
        self.consume(bytes);
        Ok(bytes)
    }
}

/// A reader that detects and decompresses plain, gzip and zstd data.
///
/// Memory: the reader's buffers and the compression window. For zstd, the decoder limits the window to 128 MiB.
pub struct Decompressor<R: Read> {
    decoder: Decoder<R>,
    compression: Compression,
    compressed: CompressedBytes,
    decompressed_bytes: u64,
}

impl<R: Read> Decompressor<R> {
    /// Inspects the first bytes of `source` and prepares to read it.
    ///
    /// # Errors
    /// Returns an error if the source cannot be read.
    pub fn new(mut source: R) -> io::Result<Self> {
        let mut start = Vec::with_capacity(ZSTD_MAGIC.len());
        source.by_ref().take(ZSTD_MAGIC.len() as u64).read_to_end(&mut start)?;
        let compression = Compression::of_content(&start);
        let compressed = CompressedBytes::default();
        compressed.add(start.len() as u64);
        let source = BufReader::with_capacity(
            BUFFER_BYTES,
            Cursor::new(start).chain(Counted { source, bytes: compressed.clone() }),
        );
        let decoder = match compression {
            Compression::Plain => Decoder::Plain(source),
            Compression::Gzip => Decoder::Gzip(Box::new(Members::new(source))),
            Compression::Zstd => Decoder::Zstd(zstd::stream::read::Decoder::with_buffer(source)?),
        };
        Ok(Decompressor { decoder, compression, compressed, decompressed_bytes: 0 })
    }

    /// Returns the detected compression.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns the number of compressed bytes read so far; `None` for plain data.
    pub(crate) fn compressed(&self) -> Option<CompressedBytes> {
        (self.compression != Compression::Plain).then(|| self.compressed.clone())
    }

    /// Checks that the data has not grown more than any recording does.
    fn check_growth(&self) -> io::Result<()> {
        let (compression, decompressed_bytes) = (self.compression, self.decompressed_bytes);
        let compressed_bytes = self.compressed.bytes();
        if compression == Compression::Plain
            || decompressed_bytes <= UNSUSPICIOUS_BYTES.max(compressed_bytes.saturating_mul(GROWTH_MAX))
        {
            return Ok(());
        }
        let bomb = CompressionError::Bomb { compression, compressed_bytes, decompressed_bytes };
        Err(io::Error::new(io::ErrorKind::InvalidData, bomb))
    }

    /// Adds the compression and the position to an error, unless the source itself failed.
    fn explain(&self, error: io::Error) -> io::Error {
        let (compression, decompressed_bytes) = (self.compression, self.decompressed_bytes);
        let kind = error.kind();
        let explained = match kind {
            _ if compression == Compression::Plain || error.raw_os_error().is_some() => return error,
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return error,
            io::ErrorKind::UnexpectedEof => CompressionError::Torn { compression, decompressed_bytes },
            _ => CompressionError::Corrupt { compression, decompressed_bytes },
        };
        io::Error::new(kind, explained)
    }
}

impl<R: Read> Read for Decompressor<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let result = match &mut self.decoder {
            Decoder::Plain(source) => source.read(buffer),
            Decoder::Gzip(decoder) => decoder.read(buffer),
            Decoder::Zstd(decoder) => decoder.read(buffer),
        };
        match result {
            Ok(bytes) => {
                self.decompressed_bytes += bytes as u64;
                self.check_growth()?;
                Ok(bytes)
            }
            Err(error) => Err(self.explain(error)),
        }
    }
}

/// Opens a file for reading, with any supported compression.
///
/// # Errors
/// Returns an error if the file cannot be opened or its first bytes cannot be read.
pub fn open(path: &Path) -> io::Result<impl BufRead + use<>> {
    decompress(File::open(path)?)
}

/// Decompresses `source`, with any supported compression.
///
/// # Errors
/// Returns an error if the first bytes of the source cannot be read.
pub fn decompress<R: Read>(source: R) -> io::Result<BufReader<Decompressor<R>>> {
    Ok(BufReader::with_capacity(BUFFER_BYTES, Decompressor::new(source)?))
}

/// An encoder. It buffers its input, because a call for each word of a text would cost more than the compression
/// itself.
enum Encoder<W: Write> {
    Plain(BufWriter<W>),
    Gzip(Box<BufWriter<flate2::write::GzEncoder<BufWriter<W>>>>),
    Zstd(BufWriter<zstd::stream::write::Encoder<'static, BufWriter<W>>>),
}

/// A writer of plain, gzip or zstd data. Only [`Compressor::finish`] completes the data. If the writer is dropped earlier, the data is
/// truncated.
pub struct Compressor<W: Write> {
    encoder: Encoder<W>,
}

impl<W: Write> fmt::Debug for Compressor<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let compression = match self.encoder {
            Encoder::Plain(_) => Compression::Plain,
            Encoder::Gzip(_) => Compression::Gzip,
            Encoder::Zstd(_) => Compression::Zstd,
        };
        f.debug_struct("Compressor").field("compression", &compression).finish_non_exhaustive()
    }
}

impl Compressor<File> {
    /// Creates or replaces a file, compressed according to its extension ([`Compression::of_extension`]).
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        Compressor::of_file(File::create(path)?, path)
    }

    /// Writes to an open file, from the file's current position. The extension of the path selects the compression.
    ///
    /// # Errors
    /// Returns an error if the encoder cannot be created.
    pub(crate) fn of_file(file: File, path: &Path) -> io::Result<Self> {
        let compression = Compression::of_extension(path);
        Compressor::with_levels(file, compression, ZSTD_LEVEL_BESIDE_A_PROGRAM, GZIP_LEVEL_BESIDE_A_PROGRAM)
    }
}

impl<W: Write> Compressor<W> {
    /// Writes to `sink` with the given compression.
    ///
    /// # Errors
    /// Returns an error if the encoder cannot be created.
    pub fn new(sink: W, compression: Compression) -> io::Result<Self> {
        Compressor::with_levels(sink, compression, ZSTD_LEVEL, GZIP_LEVEL)
    }

    fn with_levels(sink: W, compression: Compression, zstd_level: i32, gzip_level: u32) -> io::Result<Self> {
        let sink = BufWriter::with_capacity(BUFFER_BYTES, sink);
        let encoder = match compression {
            Compression::Plain => Encoder::Plain(sink),
            Compression::Gzip => {
                let encoder = flate2::GzBuilder::new().write(sink, flate2::Compression::new(gzip_level));
                Encoder::Gzip(Box::new(BufWriter::with_capacity(BUFFER_BYTES, encoder)))
            }
            Compression::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(sink, zstd_level)?;
                encoder.include_checksum(true)?;
                Encoder::Zstd(BufWriter::with_capacity(BUFFER_BYTES, encoder))
            }
        };
        Ok(Compressor { encoder })
    }

    /// Ends the compressed stream and writes all buffered data.
    ///
    /// # Errors
    /// Returns an error if the sink fails to write the last bytes.
    pub fn finish(self) -> io::Result<W> {
        let sink = match self.encoder {
            Encoder::Plain(sink) => sink,
            Encoder::Gzip(encoder) => encoder.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?,
            Encoder::Zstd(encoder) => encoder.into_inner().map_err(io::IntoInnerError::into_error)?.finish()?,
        };
        sink.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.encoder {
            Encoder::Plain(sink) => sink.write(bytes),
            Encoder::Gzip(encoder) => encoder.write(bytes),
            Encoder::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.encoder {
            Encoder::Plain(sink) => sink.flush(),
            Encoder::Gzip(encoder) => encoder.flush(),
            Encoder::Zstd(encoder) => encoder.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Compression; 3] = [Compression::Plain, Compression::Gzip, Compression::Zstd];

    fn text() -> Vec<u8> {
        (0..20_000u32).flat_map(|n| format!("line {}\n", n.wrapping_mul(2_654_435_761)).into_bytes()).collect()
    }

    fn compressed(bytes: &[u8], compression: Compression) -> Vec<u8> {
        let mut compressor = Compressor::new(Vec::new(), compression).unwrap();
        compressor.write_all(bytes).unwrap();
        compressor.finish().unwrap()
    }

    fn decompressed(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        decompress(bytes)?.read_to_end(&mut out)?;
        Ok(out)
    }

    #[test]
    fn written_data_reads_back() {
        for compression in ALL {
            for bytes in [text(), b"x".to_vec(), Vec::new()] {
                let stored = compressed(&bytes, compression);
                assert_eq!(Compression::of_content(&stored), compression);
                assert_eq!(decompressed(&stored).unwrap(), bytes);
            }
        }
    }

    #[test]
    fn concatenated_members_are_read_as_one() {
        for compression in [Compression::Gzip, Compression::Zstd] {
            let stored = [compressed(b"one ", compression), compressed(b"two", compression)].concat();
            assert_eq!(decompressed(&stored).unwrap(), b"one two");
        }
    }

    #[test]
    fn data_torn_at_any_byte_is_reported_as_torn() {
        for compression in [Compression::Gzip, Compression::Zstd] {
            let stored = compressed(&text(), compression);
            for kept in [5, 11, 20, stored.len() / 2, stored.len() - 5, stored.len() - 1] {
                let error = decompressed(&stored[..kept]).unwrap_err();
                assert!(
                    matches!(
                        CompressionError::of(&error),
                        Some(CompressionError::Torn { compression: torn, .. }) if torn == compression
                    ),
                    "{compression:?} cut at {kept} of {}: {error}",
                    stored.len()
                );
            }
        }
    }

    #[test]
    fn damaged_data_is_reported_as_damaged() {
        for compression in [Compression::Gzip, Compression::Zstd] {
            let mut stored = compressed(&text(), compression);
            let last = stored.len() - 2;
            stored[last] ^= 0x55;
            let error = decompressed(&stored).unwrap_err();
            assert!(matches!(CompressionError::of(&error), Some(CompressionError::Corrupt { .. })), "{error:?}");
        }
    }

    #[test]
    fn a_decompression_bomb_is_refused_before_it_is_decompressed() {
        for compression in [Compression::Gzip, Compression::Zstd] {
            let mut compressor = Compressor::new(Vec::new(), compression).unwrap();
            let blank = vec![b'\n'; 1 << 20];
            (0..256).for_each(|_| compressor.write_all(&blank).unwrap());
            let stored = compressor.finish().unwrap();
            let decompressed = io::copy(&mut decompress(&stored[..]).unwrap(), &mut io::sink());
            // gzip grows at most 1,032 times.
            let error = decompressed.unwrap_err();
            let Some(CompressionError::Bomb { decompressed_bytes, .. }) = CompressionError::of(&error) else {
                panic!("{compression}: {error}")
            };
            assert!(decompressed_bytes <= 65 << 20 || compression == Compression::Gzip, "{decompressed_bytes}");
        }
        // Plain data does not grow.
        let plain = vec![b'\n'; 65 << 20];
        assert_eq!(io::copy(&mut decompress(&plain[..]).unwrap(), &mut io::sink()).unwrap(), 65 << 20);
    }

    #[test]
    fn the_extension_selects_the_compression() {
        let folder = tempfile::tempdir().unwrap();
        for (name, compression) in [
            ("a.trace", Compression::Plain),
            ("a.trace.gz", Compression::Gzip),
            ("a.trace.zst", Compression::Zstd),
            ("gz", Compression::Plain),
        ] {
            let path = folder.path().join(name);
            let mut file = Compressor::create(&path).unwrap();
            file.write_all(b"symmalloc").unwrap();
            file.finish().unwrap();
            assert_eq!(Compression::of_content(&std::fs::read(&path).unwrap()), compression);
            let mut back = String::new();
            open(&path).unwrap().read_to_string(&mut back).unwrap();
            assert_eq!(back, "symmalloc");
        }
    }

    #[test]
    fn other_data_after_gzip_members_is_ignored_and_a_torn_member_is_not() {
        let pack = |text: &[u8]| {
            let mut packed = Compressor::new(Vec::new(), Compression::Gzip).unwrap();
            packed.write_all(text).unwrap();
            packed.finish().unwrap()
        };
        let unpack = |bytes: &[u8]| {
            let mut text = Vec::new();
            decompress(bytes).and_then(|mut source| source.read_to_end(&mut text)).map(|_| text)
        };
        let (one, two) = (pack(b"one"), pack(b"two"));
        for rest in [&b""[..], b"\0", b"\0\0\0garbage", b"\x1f", b"\x1f\x8a", b"garbage", &[0; 100_000]] {
            assert_eq!(unpack(&[&one, rest].concat()).unwrap(), b"one", "{rest:?}");
            assert_eq!(unpack(&[&one, &two, rest].concat()).unwrap(), b"onetwo", "{rest:?}");
        }
        for cut in 2..two.len() {
            let error = unpack(&[&one, &two[..cut]].concat()).unwrap_err();
            assert!(is_torn(&error), "{cut} of {} bytes: {error}", two.len());
        }
    }
}
