//! Configurations as text for people.

use crate::job::keys;
use symmalloc_core::Config;

/// Returns the shortest text of this configuration that still states the kind of segments. It is the canonical text without all other keys
/// that have default values.
pub(crate) fn shortest(config: &Config) -> String {
    let canonical = config.to_string();
    let mut kept: Vec<&str> = keys(&canonical);
    // Remove keys from the end: a key precedes the keys that refine it, and the text is clearer without the refinements.
    for index in (0..kept.len()).rev() {
        let mut fewer = kept.clone();
        fewer.remove(index);
        if !kept[index].starts_with("segments:") && fewer.join(",").parse::<Config>().as_ref() == Ok(config) {
            kept = fewer;
        }
    }
    kept.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_printed_without_defaults() {
        for (long, short) in [
            ("", "segments:expandable"),
            ("streams:shared", "segments:expandable,streams:shared"),
            ("stitching_aliases:65536", "segments:expandable,stitching:true"),
            ("max_split_size_mb:256,segments:fixed,streams:separate", "segments:fixed,max_split_size_mb:256"),
            ("retries_max:3,total_limit_mb:64", "segments:expandable,total_limit_mb:64"),
        ] {
            assert_eq!(shortest(&long.parse().unwrap()), short);
        }
        let listed: Config = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]".parse().unwrap();
        assert_eq!(shortest(&listed).parse::<Config>().unwrap(), listed);
    }
}
