//! Tests of `symmalloc completions` and `symmalloc man`.

use crate::{Folder, symmalloc};
use std::fs;
use std::process::Command;

const COMMANDS: [&str; 9] = ["replay", "simulate", "diff", "address", "import", "export", "chart", "report", "plan"];

#[test]
fn every_shell_completes_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = symmalloc(&format!("completions {shell}"), &[]);
        let script = &output.exited(0).stdout;
        assert!(COMMANDS.iter().all(|command| script.contains(command)), "{shell}");
        assert!(script.contains("allow-refusals"), "{shell}");
    }
    assert_eq!(symmalloc("completions tcsh", &[]).code, Some(2));
}

#[test]
fn completions_contain_the_built_in_jobs() {
    for (shell, expected) in [
        ("bash", " gpt2 moe "),
        ("zsh", ":{compadd gpt2 moe "),
        ("fish", "complete -c symmalloc -n \"__fish_symmalloc_using_subcommand replay simulate "),
    ] {
        let script = symmalloc(&format!("completions {shell}"), &[]).exited(0).stdout.clone();
        assert!(script.contains(expected), "{shell}: {script}");
    }
    // In a shell. Files are bash's default where no name matches.
    let folder = Folder::new();
    let script = folder.path("symmalloc.bash");
    fs::write(&script, &symmalloc("completions bash", &[]).exited(0).stdout).unwrap();
    let complete = r#"source "$1"; COMP_WORDS=(symmalloc replay fsdp1); COMP_CWORD=2; _symmalloc symmalloc fsdp1 replay
        echo "${COMPREPLY[@]}""#;
    let output = Command::new("bash").args(["-c", complete, "bash"]).arg(&script).output().expect("bash");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "fsdp1 fsdp1_rank1", "{output:?}");
}

#[test]
fn the_program_and_each_command_have_a_manual_page() {
    let page = symmalloc("man", &[]).exited(0).stdout.clone();
    assert!(page.contains(".TH symmalloc 1") && COMMANDS.iter().all(|command| page.contains(command)), "{page}");
    for command in COMMANDS {
        let page = symmalloc(&format!("man {command}"), &[]).exited(0).stdout.clone();
        assert!(page.contains(&format!(".TH symmalloc-{command} 1")), "{page}");
    }
    let output = symmalloc("man play", &[]);
    assert!(output.code == Some(2) && output.stderr.contains("no command play"), "{}", output.stderr);
}

#[test]
fn every_page_that_a_manual_page_cites_exists() {
    let folder = Folder::new();
    let pages = folder.path("man1");
    assert_eq!(symmalloc("man --all {}", &[&pages]).code, Some(2), "the folder does not exist");
    fs::create_dir(&pages).unwrap();
    symmalloc("man --all {}", &[&pages]).exited(0);
    let program = fs::read_to_string(pages.join("symmalloc.1")).unwrap();
    assert_eq!(program, symmalloc("man", &[]).exited(0).stdout);
    let cited: Vec<String> =
        program.lines().filter_map(|line| Some(line.strip_suffix("(1)")?.replace('\\', ""))).collect();
    assert!(cited.len() > COMMANDS.len(), "{cited:?}");
    for name in &cited {
        assert!(pages.join(format!("{name}.1")).is_file(), "{name}");
        let command = name.strip_prefix("symmalloc-").unwrap();
        assert!(
            symmalloc(&format!("man {command}"), &[]).exited(0).stdout.contains(&format!(".TH {name} 1")),
            "{name}"
        );
    }
}

#[test]
fn version_names_the_commit_of_the_checkout() {
    let git = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let commit =
        git.ok().filter(|output| output.status.success()).and_then(|output| String::from_utf8(output.stdout).ok());
    let Some(commit) = commit else {
        eprintln!("skipped: not a git checkout");
        return;
    };
    let expected = format!("symmalloc {} ({})\n", env!("CARGO_PKG_VERSION"), &commit[..12]);
    assert_eq!(symmalloc("--version", &[]).exited(0).stdout, expected);
}
