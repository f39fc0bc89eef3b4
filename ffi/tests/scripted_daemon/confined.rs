//! Programs that install a seccomp filter after they have connected.

use super::{Act, Scripted, in_child};
use tiermgr::sandbox::{self, Filter};
use tiermgr_wire::request::ToDaemon;

/// From here on the process is killed for `connect`.
fn forbid_connect() -> bool {
    let step = |code: u32, k: u32, jf: u8| libc::sock_filter {
        code: u16::try_from(code).expect("a code"),
        jt: 0,
        jf,
        k,
    };
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        step(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            u32::try_from(libc::SYS_connect).expect("small"),
            1,
        ),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0),
    ];
    let program = libc::sock_fprog { len: 4, filter: steps.as_mut_ptr() };
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
