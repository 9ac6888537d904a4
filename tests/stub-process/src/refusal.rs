//! A system that creates no more threads, as at the limit on processes (`ulimit -u`) or on a cgroup's `pids`.

use libc::{
    BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, CLONE_THREAD, EAGAIN, ENOSYS,
    SECCOMP_FILTER_FLAG_TSYNC, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, SECCOMP_SET_MODE_FILTER, sock_filter, sock_fprog,
};

/// Offsets of the number and of the lower half of the first argument of a system call.
const NUMBER: u32 = 0;
const FIRST_ARGUMENT: u32 = 16;

/// Makes the system refuse all further threads of this process and of programs that it executes. New processes are still possible.
///
/// A filter of system calls answers like the kernel at its limit. The limit itself does not apply to root.
///
/// # Panics
/// Panics if the system rejects the filter.
pub fn refuse_threads() {
    let step = |code: u32, jt: u8, jf: u8, k: u32| sock_filter { code: code as u16, jt, jf, k };
    let load = |offset| step(BPF_LD | BPF_W | BPF_ABS, 0, 0, offset);
    let answer = |value| step(BPF_RET | BPF_K, 0, 0, value);
    let mut filter = [
        load(NUMBER),
        // The C library then uses `clone`, whose flags a filter can read.
        step(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, libc::SYS_clone3 as u32),
        answer(SECCOMP_RET_ERRNO | ENOSYS as u32),
        step(BPF_JMP | BPF_JEQ | BPF_K, 0, 3, libc::SYS_clone as u32),
        load(FIRST_ARGUMENT),
        step(BPF_JMP | BPF_JSET | BPF_K, 0, 1, CLONE_THREAD as u32),
        answer(SECCOMP_RET_ERRNO | EAGAIN as u32),
        answer(SECCOMP_RET_ALLOW),
    ];
    let program = sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its steps are valid during the calls, which change only the attributes of this process.
    let outcome = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &raw const program)
    };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
}
