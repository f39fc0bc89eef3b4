//! Programs that install a seccomp filter after they have connected.

use super::{Act, Scripted, in_child};
use tiermgr::sandbox::{self, Deed, Filter};
use tiermgr_wire::request::{Kind, ToDaemon};

#[cfg(target_arch = "x86_64")]
const ALARM: libc::c_long = libc::SYS_alarm;
#[cfg(not(target_arch = "x86_64"))]
const ALARM: libc::c_long = libc::SYS_setitimer;

fn step(code: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: u16::try_from(code).expect("a code"), jt, jf, k }
}

/// From here on the process is killed for these system calls, or for all others.
fn install(numbers: &[libc::c_long], listed: u32, otherwise: u32) -> bool {
    let mut steps = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for &number in numbers {
        let number = u32::try_from(number).expect("small");
        steps.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, 0, 1));
        steps.push(step(libc::BPF_RET | libc::BPF_K, listed, 0, 0));
    }
    steps.push(step(libc::BPF_RET | libc::BPF_K, otherwise, 0, 0));
    let len = u16::try_from(steps.len()).expect("few");
    let program = libc::sock_fprog { len, filter: steps.as_mut_ptr() };
    // SAFETY: plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return false;
    }
    let mode = libc::SECCOMP_MODE_FILTER;
    let installed = sandbox::around(Filter::Program(&steps), || {
        // SAFETY: the filter outlives the call.
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program).into() }
    });
    installed == 0
}

fn forbid_connect() -> bool {
    install(&[libc::SYS_connect], libc::SECCOMP_RET_KILL_PROCESS, libc::SECCOMP_RET_ALLOW)
}

/// All else kills, but for what a test and libc's heap take.
fn allow_only(deed: Deed, own: &[libc::c_long]) -> bool {
    let usual = [libc::SYS_exit_group, libc::SYS_brk];
    let numbers = [&deed.numbers()[..], own, &usual].concat();
    install(&numbers, libc::SECCOMP_RET_ALLOW, libc::SECCOMP_RET_KILL_PROCESS) && sandbox::may(deed)
}

#[test]
fn what_is_done_takes_no_call_that_is_not_listed() {
    let Some(daemon) = Scripted::new("listed") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    let status = in_child(|| {
        let asked = allow_only(Deed::Ask, &[])
            && client.prefetch(block.address, 4096).is_ok()
            && client.discard_range(block.address, 4096).is_ok();
        let left = client.create_region(2 << 20, Kind::Weights, "weights").is_err();
        i32::from(!asked || !left)
    });
    assert_eq!(status, 0, "{status:#x}");
    let status = in_child(|| {
        let is_grown = allow_only(Deed::Grow, &[])
            && client.create_region(2 << 20, Kind::Weights, "weights").is_ok()
            && client.allocate(300 << 20, 4096).is_ok();
        i32::from(!is_grown)
    });
    assert_eq!(status, 0, "{status:#x}");
    let status = in_child(|| {
        // What fork, alarm and waitpid take.
        let fork =
            [libc::SYS_set_robust_list, libc::SYS_rseq, libc::SYS_gettid, ALARM, libc::SYS_wait4];
        if !allow_only(Deed::Join, &fork) {
            return 1;
        }
        in_child(|| i32::from(client.prefetch(block.address, 4096).is_err()))
    });
    assert_eq!(status, 0, "{status:#x}");
    assert_eq!(daemon.book.seen(|message| matches!(message, ToDaemon::Attach(_))), 5);
    client.disconnect().expect("quiet");
}

#[test]
fn a_lost_connection_is_not_made_again_where_that_would_end_the_program() {
    let Some(daemon) = Scripted::new("filtered") else { return };
    let client = daemon.client();
    let block = client.allocate(1 << 20, 4096).expect("a block");
    daemon.book.act(|message| match message {
        ToDaemon::Prefetch { .. } => Act::Vanish,
        _ => Act::Usual,
    });
    let status = in_child(|| {
        // The script has no answer to this that fits.
        let is_ready = client.residency(block.address, 4096).is_err() && forbid_connect();
        let refused = [0; 3].map(|_| client.prefetch(block.address, 4096).is_err());
        i32::from(!is_ready || refused.contains(&false))
    });
    assert_eq!(status, 0, "{status:#x}");
    client.disconnect().expect("quiet");
}
