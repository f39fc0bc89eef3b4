use super::*;
use std::io::{Read, Seek, Write};

fn folder() -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("tiermgr-sock-{}-{number}", std::process::id()));
    std::fs::create_dir(&path).expect("folder");
    path
}

#[test]
fn descriptors_arrive_with_their_message() {
    let (a, b) = Stream::pair().expect("pair");
    let path = folder();
    let mut file = std::fs::File::create_new(path.join("x")).expect("file");
    file.write_all(b"through").expect("write");
    let open = std::fs::File::open(path.join("x")).expect("file");
    a.send_with_fds(b"hello", &[open.as_fd(), a.as_fd()]).expect("send");
    a.send_with_fds(b"plain", &[]).expect("send");
    let mut buffer = [0; 64];
    let (n, fds) = b.recv_with_fds(&mut buffer).expect("receive");
    assert_eq!((&buffer[..n], fds.len()), (&b"hello"[..], 2));
    let mut text = String::new();
    let mut twin = std::fs::File::from(fds.into_iter().next().expect("two"));
    twin.rewind().expect("seek");
    twin.read_to_string(&mut text).expect("read");
    assert_eq!(text, "through");
    let (n, fds) = b.recv_with_fds(&mut buffer).expect("receive");
    assert_eq!((&buffer[..n], fds.len()), (&b"plain"[..], 0));
    std::fs::remove_dir_all(path).expect("clean");
}

#[test]
fn as_many_descriptors_as_promised_and_not_one_more() {
    let (a, b) = Stream::pair().expect("pair");
    let eight = [a.as_fd(); FDS_MAX];
    a.send_with_fds(b"x", &eight).expect("send");
    let (_, fds) = b.recv_with_fds(&mut [0; 8]).expect("receive");
    assert_eq!(fds.len(), FDS_MAX);
    let nine = [a.as_fd(); FDS_MAX + 1];
    assert!(a.send_with_fds(b"x", &nine).is_err());
}

#[test]
fn a_message_that_does_not_fit_is_an_error_and_leaks_nothing() {
    let (a, b) = Stream::pair().expect("pair");
    let (probe, theirs) = Stream::pair().expect("pair");
    a.send_with_fds(&[1; 100], &[theirs.as_fd()]).expect("send");
    drop(theirs);
    let error = b.recv_with_fds(&mut [0; 10]).expect_err("too long");
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    // The descriptor that came was closed: its other end sees the end.
    assert_eq!(probe.recv_with_fds(&mut [0; 8]).expect("receive").0, 0);
}

#[test]
fn an_end_reads_as_no_bytes_and_a_write_to_it_fails() {
    let (a, b) = Stream::pair().expect("pair");
    drop(a);
    assert_eq!(b.recv_with_fds(&mut [0; 8]).expect("receive").0, 0);
    assert_eq!(b.send_with_fds(b"x", &[]).expect_err("closed").kind(), io::ErrorKind::BrokenPipe);
    assert!(b.send_with_fds(b"", &[]).is_err());
}

#[test]
fn a_wait_for_a_message_ends() {
    let (_a, b) = Stream::pair().expect("pair");
    b.set_recv_timeout(Some(Duration::from_millis(10))).expect("timeout");
    let error = b.recv_with_fds(&mut [0; 8]).expect_err("nothing was sent");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    assert!(b.set_recv_timeout(Some(Duration::ZERO)).is_err());
}

#[test]
fn a_listener_takes_over_a_stale_path_and_respects_a_live_one() {
    let folder = folder();
    let path = folder.join("s");
    let first = Listener::bind(&path, 0o600, None).expect("bind");
    let mode = std::fs::metadata(&path).expect("stat").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let client = Stream::connect_within(&path, Duration::from_secs(10)).expect("connect");
    let server = first.accept().expect("accept");
    assert_eq!(server.peer_cred().expect("cred").pid, std::process::id().cast_signed());
    client.send_with_fds(b"x", &[]).expect("send");
    assert_eq!(server.recv_with_fds(&mut [0; 8]).expect("receive").0, 1);
    let taken = Listener::bind(&path, 0o600, None).expect_err("somebody listens");
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    drop(first);
    Listener::bind(&path, 0o666, None).expect("a stale socket is replaced");
    let long = folder.join("x".repeat(200));
    let error = Listener::bind(&long, 0o600, None).expect_err("too long");
    assert!(error.to_string().contains("107"));
    std::fs::remove_dir_all(folder).expect("clean");
}

#[test]
fn a_file_in_the_way_of_a_listener_stays() {
    let folder = folder();
    let (path, aside) = (folder.join("s"), folder.join("s~"));
    for in_the_way in [&path, &aside] {
        std::fs::write(in_the_way, "a letter").expect("write");
        let error = Listener::bind(&path, 0o600, None).expect_err("it is there");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert!(error.to_string().contains(in_the_way.to_str().expect("a name")), "{error}");
        assert_eq!(std::fs::read(in_the_way).expect("read"), b"a letter");
        std::fs::remove_file(in_the_way).expect("it is there");
    }
    std::fs::remove_dir_all(folder).expect("clean");
}

/// A client that finds another one takes it that no daemon is to come, or none for it.
#[test]
fn a_socket_is_ready_from_the_first_instant_on() {
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicBool, Ordering};
    let folder = folder();
    let path = folder.join("s");
    // SAFETY: no preconditions.
    let group = unsafe { libc::getegid() };
    let is_over = AtomicBool::new(false);
    let odd = std::thread::scope(|scope| {
        let seen = scope.spawn(|| {
            let mut odd = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                if let Ok(found) = std::fs::metadata(&path)
                    && found.mode() & 0o777 != 0o666
                {
                    odd.push(found.mode());
                }
            }
            odd
        });
        for _ in 0..1000 {
            drop(Listener::bind(&path, 0o666, Some(group)).expect("bind"));
        }
        is_over.store(true, Ordering::Relaxed);
        seen.join().expect("no panic")
    });
    assert_eq!(odd, []);
    std::fs::remove_dir_all(folder).expect("clean");
}

/// Connects, and gives up again, until there is no room any more; gives how many found some.
fn crowd(path: &Path) -> usize {
    let mut found_room = 0;
    loop {
        match Stream::connect_within(path, Duration::from_millis(1)) {
            Ok(stream) => drop(stream),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
                return found_room;
            }
        }
        found_room += 1;
    }
}

#[test]
fn a_connect_that_is_not_accepted_ends() {
    let folder = folder();
    let path = folder.join("s");
    let listener = Listener::bind(&path, 0o600, None).expect("bind");
    assert!(crowd(&path) >= usize::try_from(BACKLOG).expect("a number"));
    let error = Stream::connect_within(&path, Duration::ZERO).expect_err("no room");
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    let taken = Listener::bind(&path, 0o600, None).expect_err("somebody listens");
    assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
    drop(listener.accept().expect("one that gave up"));
    let client = Stream::connect_within(&path, Duration::from_secs(10)).expect("there is room");
    // A send has the limit that it is given, and none of the connect's.
    client.send_with_fds(b"x", &[]).expect("send");
    std::fs::remove_dir_all(folder).expect("clean");
}

extern "C" fn ignore(_signal: libc::c_int) {}

/// Longer than anything here takes.
const SIGNALS_FOR: Duration = Duration::from_secs(20);

/// Calls `inside`, and a signal handler on this thread again and again meanwhile; not for ever.
fn under_a_timer<T>(inside: impl FnOnce() -> T) -> T {
    use std::sync::atomic::{AtomicBool, Ordering};
    // SAFETY: zeros are a valid `sigaction`: no flags, and an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as *const () as usize;
    // SAFETY: the handler is a function of the kind that it is installed as.
    check(unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()) })
        .expect("a handler");
    // SAFETY: no preconditions.
    let own = unsafe { libc::pthread_self() };
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && began.elapsed() < SIGNALS_FOR {
                // SAFETY: the thread waits for this one.
                unsafe { libc::pthread_kill(own, libc::SIGUSR1) };
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let outcome = inside();
        is_over.store(true, Ordering::Relaxed);
        outcome
    })
}

#[test]
fn a_connect_that_is_not_accepted_ends_under_a_timer() {
    let folder = folder();
    let path = folder.join("s");
    let _listener = Listener::bind(&path, 0o600, None).expect("bind");
    crowd(&path);
    let (began, wait) = (Instant::now(), Duration::from_millis(200));
    let error = under_a_timer(|| Stream::connect_within(&path, wait).expect_err("no room"));
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    let took = began.elapsed();
    assert!(took >= wait && took < SIGNALS_FOR, "{took:?}");
    std::fs::remove_dir_all(folder).expect("clean");
}

/// Whoever waits on decides how long.
#[test]
fn a_wait_for_a_message_ends_where_a_signal_handler_is_called() {
    let (_a, b) = Stream::pair().expect("pair");
    b.set_recv_timeout(Some(2 * SIGNALS_FOR)).expect("timeout");
    let error = under_a_timer(|| b.recv_with_fds(&mut [0; 8]).expect_err("nothing was sent"));
    assert_eq!(error.kind(), io::ErrorKind::Interrupted);
}
