//! Detection of settings that the model of PyTorch's rule does not support. They are an error, because ignoring them would give
//! wrong results.

use symmalloc_core::config::{Config, ConfigError, SegmentPolicy, StreamPolicy};

/// A setting that the model of PyTorch's rule does not support.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--order address does not support `{setting}`: the model of PyTorch's rule has no such setting")]
pub(crate) struct UnknownToModel {
    setting: String,
}

impl UnknownToModel {
    /// Checks the settings of the flags.
    ///
    /// # Errors
    /// Returns the first setting that the model does not support.
    pub(crate) fn of(config: Option<&Config>, streams: Option<StreamPolicy>) -> Result<(), Self> {
        if let Some(streams) = streams.filter(|streams| *streams != StreamPolicy::Separate) {
            return Err(UnknownToModel { setting: format!("streams:{}", streams.word()) });
        }
        let Some(config) = config else { return Ok(()) };
        let followed = followed(config).unwrap_or_default().to_string();
        let followed = keys(&followed);
        match keys(&config.to_string()).into_iter().find(|key| !followed.contains(key)) {
            Some(setting) => Err(UnknownToModel { setting: setting.to_owned() }),
            None => Ok(()),
        }
    }
}

/// Returns a configuration with the supported settings of `config`, and defaults otherwise.
fn followed(config: &Config) -> Result<Config, ConfigError> {
    let (pool, plain) = (config.default_pool(), Config::default());
    let builder = plain.default_pool().to_builder().roundup_power2_divisions(pool.roundup_power2_divisions());
    let builder = match pool.segments() {
        SegmentPolicy::Fixed(fixed) => builder.segments(SegmentPolicy::Fixed(fixed.clone())),
        _ => builder,
    };
    plain.to_builder().default_pool(builder.build()?).build()
}

/// Splits a configuration's text at its commas, but not within brackets.
pub(crate) fn keys(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let split = |character: char| {
        match character {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        character == ',' && depth == 0
    };
    text.split(split).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_setting_that_the_model_cannot_follow_is_named() {
        let of = |text: &str| {
            let config: Config = text.parse().unwrap();
            UnknownToModel::of(Some(&config), None).err().map(|unknown| unknown.setting)
        };
        for followed in [
            "segments:expandable",
            "segments:fixed",
            "segments:fixed,max_split_size_mb:256,large_segment_size_mb:32",
            "roundup_power2_divisions:[256:1,512:2,>:4]",
        ] {
            assert_eq!(of(followed), None, "{followed}");
        }
        for (text, unknown) in [
            ("total_limit_mb:1000", "total_limit_mb:1000"),
            ("segments:fixed,streams:shared", "streams:shared"),
            ("segments:reserved,segment_mb:64", "segments:reserved"),
            ("symmetric:true", "symmetric:true"),
        ] {
            assert_eq!(of(text).as_deref(), Some(unknown), "{text}");
        }
    }
}
