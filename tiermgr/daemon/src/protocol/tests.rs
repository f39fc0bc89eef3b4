use super::*;
use tiermgr_wire::request::RegionOptions;

const PAGE: u64 = 4096;
const LIMBO: u64 = 8 << 20;
const LIMBO_START: u64 = 0x7f00_0000_0000;
const NONCE: u64 = 0x7e00_0000_1000;

fn packet(message: &ToDaemon) -> Vec<u8> {
    let mut buffer = vec![0; tiermgr_wire::PACKET_BYTES_MAX];
    tiermgr_wire::encode(message, &mut buffer).unwrap().to_vec()
}

fn hello(role: Role) -> ToDaemon {
    ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION, role })
}

fn client() -> ToDaemon {
    hello(Role::Client { name: "redis".into(), class: Class::Standard })
}

fn attach() -> Attach {
    Attach { limbo_start: LIMBO_START, nonce_page: NONCE, helper_pid: 7 }
}

fn attached() -> Protocol {
    let mut protocol = Protocol::new(PAGE, LIMBO);
    protocol.next(&packet(&client()), 0).unwrap();
    protocol.next(&packet(&ToDaemon::Attach(attach())), 2).unwrap();
    assert!(protocol.is_settled());
    protocol
}

fn code(result: Result<Step, Refused>) -> (ErrorCode, bool) {
    let refused = result.unwrap_err();
    (refused.code, refused.close)
}

#[test]
fn a_client_says_hello_attaches_and_asks() {
    let mut protocol = attached();
    let request = ToDaemon::AddRegion {
        start: CHUNK_BYTES,
        len: 4 * CHUNK_BYTES,
        options: RegionOptions { kind: Kind::Weights },
        name: "w\n".repeat(100),
    };
    let step = protocol.next(&packet(&request), 0).unwrap();
    let Step::AddRegion { span, kind, name } = step else { panic!("{step:?}") };
    assert_eq!(span, Span::new(Addr(CHUNK_BYTES), 4 * CHUNK_BYTES));
    assert_eq!(kind, Kind::Weights);
    assert!(name.len() <= NAME_BYTES_MAX && !name.contains('\n'), "{name:?}");
    assert_eq!(protocol.next(&packet(&ToDaemon::Stats), 0), Ok(Step::Stats));
}

#[test]
fn each_stage_takes_only_its_own_messages() {
    let mut fresh = Protocol::new(PAGE, LIMBO);
    assert_eq!(code(fresh.next(&packet(&ToDaemon::Stats), 0)), (ErrorCode::Protocol, true));
    // Closed for good.
    assert_eq!(code(fresh.next(&packet(&client()), 0)), (ErrorCode::Protocol, true));

    let mut welcomed = Protocol::new(PAGE, LIMBO);
    welcomed.next(&packet(&client()), 0).unwrap();
    assert_eq!(code(welcomed.next(&packet(&ToDaemon::Stats), 0)), (ErrorCode::Protocol, true));

    let mut twice = attached();
    assert_eq!(code(twice.next(&packet(&client()), 0)), (ErrorCode::Protocol, true));

    let shutdown = packet(&ToDaemon::Control(ControlRequest::Shutdown));
    assert_eq!(code(attached().next(&shutdown, 0)), (ErrorCode::Protocol, true));

    let mut control = Protocol::new(PAGE, LIMBO);
    control.next(&packet(&hello(Role::Control)), 0).unwrap();
    assert_eq!(control.next(&shutdown, 0), Ok(Step::Control(ControlRequest::Shutdown)));
    assert_eq!(code(control.next(&packet(&ToDaemon::Stats), 0)), (ErrorCode::Protocol, true));
}

#[test]
fn another_version_is_told_so() {
    let mut protocol = Protocol::new(PAGE, LIMBO);
    let other = ToDaemon::Hello(Hello { version: tiermgr_wire::VERSION + 1, role: Role::Control });
    assert_eq!(code(protocol.next(&packet(&other), 0)), (ErrorCode::VersionMismatch, true));
}

#[test]
fn descriptors_come_with_an_attach_and_in_the_right_number() {
    for (role, right) in
        [(client(), 2), (hello(Role::ForkedChild { family: 9, lacks_arena: true }), 1)]
    {
        for fds in 0..4 {
            let mut protocol = Protocol::new(PAGE, LIMBO);
            assert!(protocol.next(&packet(&role), 0).is_ok());
            let step = protocol.next(&packet(&ToDaemon::Attach(attach())), fds);
            if fds == right {
                assert_eq!(step, Ok(Step::Attach(attach())));
            } else {
                assert_eq!(code(step), (ErrorCode::InvalidArgument, true));
            }
        }
    }
    assert_eq!(
        code(Protocol::new(PAGE, LIMBO).next(&packet(&client()), 1)),
        (ErrorCode::Protocol, true)
    );
}

#[test]
fn only_a_child_that_said_hello_can_be_recognised() {
    let mut child = Protocol::new(PAGE, LIMBO);
    child.next(&packet(&hello(Role::ForkedChild { family: 9, lacks_arena: true })), 0).unwrap();
    child.recognise();
    assert_eq!(child.next(&packet(&ToDaemon::Stats), 0), Ok(Step::Stats));

    let mut client_too = Protocol::new(PAGE, LIMBO);
    client_too.recognise();
    client_too.next(&packet(&client()), 0).unwrap();
    client_too.recognise();
    assert!(!client_too.is_settled());
}

#[test]
fn limbo_and_the_nonce_page_are_checked() {
    let refused = |attach: Attach| {
        let mut protocol = Protocol::new(PAGE, LIMBO);
        protocol.next(&packet(&client()), 0).unwrap();
        code(protocol.next(&packet(&ToDaemon::Attach(attach)), 2))
    };
    for bad in [
        Attach { limbo_start: LIMBO_START + PAGE, ..attach() },
        Attach { limbo_start: !(CHUNK_BYTES - 1), ..attach() },
        Attach { limbo_start: (1 << 56) - LIMBO + CHUNK_BYTES, ..attach() },
        Attach { limbo_start: 0, ..attach() },
        Attach { nonce_page: NONCE + 1, ..attach() },
        Attach { nonce_page: 0, ..attach() },
        Attach { nonce_page: LIMBO_START + LIMBO - PAGE, ..attach() },
    ] {
        assert_eq!(refused(bad), (ErrorCode::InvalidArgument, true), "{bad:x?}");
    }
}

#[test]
fn ranges_are_checked_at_the_edge_and_beyond() {
    let ask = |start, len| attached().next(&packet(&ToDaemon::Discard { start, len }), 0);
    let end = 1_u64 << 56;
    assert!(ask(PAGE, PAGE).is_ok());
    assert!(ask(end - PAGE, PAGE).is_ok());
    for (start, len) in [
        (PAGE, 0),
        (0, PAGE),
        (PAGE + 1, PAGE),
        (PAGE, PAGE - 1),
        (end - PAGE, 2 * PAGE),
        (u64::MAX - PAGE + 1, PAGE),
        (u64::MAX - PAGE + 1, 2 * PAGE),
        (PAGE, u64::MAX - PAGE + 1),
    ] {
        // The program goes on: a wrong range is no breach of the protocol.
        assert_eq!(code(ask(start, len)), (ErrorCode::InvalidArgument, false), "{start:x} {len:x}");
    }
    let region = |start, len| {
        let options = RegionOptions::default();
        attached()
            .next(&packet(&ToDaemon::AddRegion { start, len, options, name: String::new() }), 0)
    };
    assert!(region(CHUNK_BYTES, CHUNK_BYTES).is_ok());
    assert_eq!(code(region(CHUNK_BYTES + PAGE, CHUNK_BYTES)), (ErrorCode::InvalidArgument, false));
    assert_eq!(code(region(CHUNK_BYTES, PAGE)), (ErrorCode::InvalidArgument, false));
}

#[test]
fn names_are_cut_at_a_character() {
    let long = "ä".repeat(NAME_BYTES_MAX);
    assert_eq!(shorten(long), "ä".repeat(NAME_BYTES_MAX / 2));
    let odd = format!("x{}", "ä".repeat(NAME_BYTES_MAX));
    assert_eq!(shorten(odd).len(), NAME_BYTES_MAX - 1);
    assert_eq!(shorten("a\u{1b}[2J".into()), "a\u{fffd}[2J");
}

/// xorshift: the same packets in every run.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).unwrap()
    }
}

/// Valid messages, bent and cut at random, in random order: whatever comes, the answer is a step that
/// the stage allows or a refusal, and after a closing one nothing else.
#[test]
fn random_packets_never_break_the_rules() {
    let messages: Vec<Vec<u8>> = [
        client(),
        hello(Role::Control),
        hello(Role::ForkedChild { family: u64::MAX, lacks_arena: false }),
        ToDaemon::Attach(attach()),
        ToDaemon::AddRegion {
            start: CHUNK_BYTES,
            len: CHUNK_BYTES,
            options: RegionOptions::default(),
            name: "n".repeat(80),
        },
        ToDaemon::DropRegion { region: 3 },
        ToDaemon::Discard { start: PAGE, len: PAGE },
        ToDaemon::Advise { start: PAGE, len: PAGE, advice: request::Advice::Cyclic },
        ToDaemon::Prefetch { start: PAGE, len: PAGE },
        ToDaemon::Pin { start: PAGE, len: PAGE },
        ToDaemon::Unpin { lease: 1 },
        ToDaemon::Residency { start: PAGE, len: PAGE },
        ToDaemon::Stats,
        ToDaemon::Control(ControlRequest::Regions { skip: 128 }),
    ]
    .iter()
    .map(packet)
    .collect();
    for seed in 1..=2000_u64 {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut protocol = Protocol::new(PAGE, LIMBO);
        let (mut closed, mut welcomed, mut settled) = (false, false, false);
        for turn in 0..40 {
            let mut bytes = messages[chance.below(messages.len())].clone();
            match chance.below(4) {
                0 => {
                    let at = chance.below(bytes.len());
                    bytes[at] ^= 1 << chance.below(8);
                }
                1 => bytes.truncate(chance.below(bytes.len() + 1)),
                2 if chance.below(4) == 0 => {
                    bytes = (0..chance.below(64)).map(|_| chance.next().to_le_bytes()[0]).collect();
                }
                _ => {}
            }
            let result = protocol.next(&bytes, chance.below(4));
            let place = format!("seed {seed} turn {turn}: {bytes:x?} -> {result:?}");
            match result {
                Ok(step) => {
                    assert!(!closed, "{place}");
                    match step {
                        Step::WelcomeClient { .. } | Step::WelcomeChild { .. } => {
                            assert!(!welcomed, "{place}");
                            welcomed = true;
                        }
                        Step::WelcomeControl => {
                            assert!(!welcomed, "{place}");
                            welcomed = true;
                            settled = true;
                        }
                        Step::Attach(_) => {
                            assert!(welcomed && !settled, "{place}");
                            settled = true;
                        }
                        _ => assert!(settled, "{place}"),
                    }
                }
                Err(refused) => {
                    assert!(!refused.message.is_empty(), "{place}");
                    assert!(!closed || refused.close, "{place}");
                    closed |= refused.close;
                }
            }
            assert_eq!(protocol.is_settled(), settled && !closed, "seed {seed} turn {turn}");
        }
    }
}
