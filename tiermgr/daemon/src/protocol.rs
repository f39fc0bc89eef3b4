//! What a peer may say when: the rules of a connection, without doing anything.
//!
//! A packet comes in; out comes a [`Step`], which is checked for form (alignment, overflow, lengths,
//! number of descriptors) and carried out by `session`, or a [`Refused`]. Everything here works on
//! bytes of strangers, so nothing here can fail otherwise: no packet panics, and what may follow a
//! packet depends on the stage alone.
//!
//! Stages: fresh -> welcomed -> attached for a client or a forked child, fresh -> control for
//! `tiermgrctl`. A process that is attached already comes back as a child of its own family and is at
//! once attached. A step advances the stage at once: if carrying it out fails, the session ends.

use tiermgr_core::event::{Advice, Request};
use tiermgr_core::units::{Addr, CHUNK_BYTES, LeaseId, RegionId, Span};
use tiermgr_wire::control::ControlRequest;
use tiermgr_wire::hello::{Attach, Class, Hello, Role};
use tiermgr_wire::reply::ErrorCode;
use tiermgr_wire::request::{self, Kind, ToDaemon};

/// Largest packet that a peer may send. Every request fits with room to spare.
pub const REQUEST_BYTES_MAX: usize = 4 << 10;

/// Bytes of a name that are kept.
pub const NAME_BYTES_MAX: usize = 64;

/// No user address of any supported machine lies above (aarch64 with 52 bits, x86-64 with 56).
const ADDRESS_END_MAX: u64 = 1 << 56;

/// Userfaultfds that come with the attach of a client: its arenas', then limbo's.
pub const ATTACH_FDS_CLIENT: usize = 2;
/// A forked child sends that of its limbo.
pub const ATTACH_FDS_CHILD: usize = 1;

/// What is to be done for a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Begin a family and answer with `Welcome`.
    WelcomeClient {
        /// For lists, cut to [`NAME_BYTES_MAX`].
        name: String,
        /// Who gives way.
        class: Class,
    },
    /// Find the family and answer with `Welcome`, or with `Ready` where the process is attached already.
    WelcomeChild {
        /// The secret number that its parent was given.
        family: u64,
        /// Where it is attached already, it is to be given the userfaultfd of its arenas.
        lacks_arena: bool,
    },
    /// Answer with `Ready`.
    WelcomeControl,
    /// Take the process into service.
    Attach(Attach),
    /// Manage a range.
    AddRegion {
        /// Where.
        span: Span,
        /// What lies in it.
        kind: Kind,
        /// For lists, cut to [`NAME_BYTES_MAX`].
        name: String,
    },
    /// Something for the manager.
    Ask(Request),
    /// The family's counters.
    Stats,
    /// Something for an operator.
    Control(ControlRequest),
}

/// Something that is not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// For programs.
    pub code: ErrorCode,
    /// For people.
    pub message: String,
    /// The peer does not follow the protocol: nothing more is read from it.
    pub close: bool,
}

impl Refused {
    /// A refusal after which the connection goes on.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), close: false }
    }

    /// A refusal that ends the connection.
    #[must_use]
    pub fn closing(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), close: true }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Fresh,
    Welcomed { child: bool },
    Attached,
    Control,
    Closed,
}

/// The rules of one connection.
#[derive(Debug)]
pub struct Protocol {
    stage: Stage,
    page_bytes: u64,
    limbo_bytes: u64,
}

impl Protocol {
    /// A connection that has said nothing yet. `limbo_bytes` is what `Welcome` will say.
    #[must_use]
    pub const fn new(page_bytes: u64, limbo_bytes: u64) -> Self {
        Self { stage: Stage::Fresh, page_bytes, limbo_bytes }
    }

    /// Whether the peer is attached, so that silence between its packets is in order.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        matches!(self.stage, Stage::Attached | Stage::Control)
    }

    /// Takes a packet with `fds` descriptors.
    ///
    /// # Errors
    /// What is wrong with it. After one that says `close` every further packet is refused the same
    /// way.
    pub fn next(&mut self, packet: &[u8], fds: usize) -> Result<Step, Refused> {
        let step = self.judge(packet, fds);
        match &step {
            Ok(Step::WelcomeClient { .. }) => self.stage = Stage::Welcomed { child: false },
            Ok(Step::WelcomeChild { .. }) => self.stage = Stage::Welcomed { child: true },
            Ok(Step::WelcomeControl) => self.stage = Stage::Control,
            Ok(Step::Attach(_)) => self.stage = Stage::Attached,
            Err(refused) if refused.close => self.stage = Stage::Closed,
            Ok(_) | Err(_) => {}
        }
        step
    }

    /// The child that said hello is a process that is attached already: it lost its connection, or the
    /// daemon was restarted. It goes on where it was.
    pub fn recognise(&mut self) {
        if self.stage == (Stage::Welcomed { child: true }) {
            self.stage = Stage::Attached;
        }
    }

    fn judge(&self, packet: &[u8], fds: usize) -> Result<Step, Refused> {
        let protocol = |message: &str| Refused::closing(ErrorCode::Protocol, message);
        let message: ToDaemon = tiermgr_wire::decode(packet)
            .map_err(|error| Refused::closing(ErrorCode::Protocol, error.to_string()))?;
        if fds != 0 && !matches!(message, ToDaemon::Attach(_)) {
            return Err(protocol("descriptors come with an attach only"));
        }
        match (self.stage, message) {
            (Stage::Fresh, ToDaemon::Hello(hello)) => judge_hello(hello),
            (Stage::Fresh, _) => Err(protocol("the first message must be a hello")),
            (Stage::Welcomed { child }, ToDaemon::Attach(attach)) => {
                self.judge_attach(attach, child, fds)
            }
            (Stage::Welcomed { .. }, _) => Err(protocol("after the hello comes the attach")),
            (Stage::Control, ToDaemon::Control(request)) => Ok(Step::Control(request)),
            (Stage::Control, _) => {
                Err(protocol("a control connection carries control requests only"))
            }
            (Stage::Attached, message) => self.judge_request(message),
            (Stage::Closed, _) => Err(protocol("the connection has ended")),
        }
    }

    fn judge_attach(&self, attach: Attach, child: bool, fds: usize) -> Result<Step, Refused> {
        let wrong = |message: String| Refused::closing(ErrorCode::InvalidArgument, message);
        let wanted = if child { ATTACH_FDS_CHILD } else { ATTACH_FDS_CLIENT };
        if fds != wanted {
            return Err(wrong(format!(
                "an attach of this kind carries {wanted} descriptors, not {fds}"
            )));
        }
        let nonce = self
            .span(attach.nonce_page, self.page_bytes, self.page_bytes)
            .map_err(|why| wrong(format!("the nonce page {why}")))?;
        if self.limbo_bytes != 0 {
            let limbo = self
                .span(attach.limbo_start, self.limbo_bytes, CHUNK_BYTES)
                .map_err(|why| wrong(format!("limbo {why}")))?;
            if limbo.overlaps(nonce) {
                return Err(wrong("the nonce page lies in limbo".into()));
            }
        }
        Ok(Step::Attach(attach))
    }

    fn judge_request(&self, message: ToDaemon) -> Result<Step, Refused> {
        let range = |start, len, align| {
            self.span(start, len, align)
                .map_err(|why| Refused::new(ErrorCode::InvalidArgument, format!("the range {why}")))
        };
        let page = self.page_bytes;
        let request = match message {
            ToDaemon::AddRegion { start, len, options, name } => {
                let span = range(start, len, CHUNK_BYTES)?;
                return Ok(Step::AddRegion { span, kind: options.kind, name: shorten(name) });
            }
            ToDaemon::Stats => return Ok(Step::Stats),
            ToDaemon::DropRegion { region } => Request::DropRegion { region: RegionId(region) },
            ToDaemon::Discard { start, len } => Request::Discard { span: range(start, len, page)? },
            ToDaemon::Advise { start, len, advice } => {
                Request::Advise { span: range(start, len, page)?, advice: advice_of(advice) }
            }
            ToDaemon::Prefetch { start, len } => {
                Request::Prefetch { span: range(start, len, page)? }
            }
            ToDaemon::Pin { start, len } => Request::Pin { span: range(start, len, page)? },
            ToDaemon::Unpin { lease } => Request::Unpin { lease: LeaseId(lease) },
            ToDaemon::Residency { start, len } => {
                Request::Residency { span: range(start, len, page)? }
            }
            ToDaemon::Hello(_) | ToDaemon::Attach(_) | ToDaemon::Control(_) => {
                return Err(Refused::closing(
                    ErrorCode::Protocol,
                    "an attached program cannot say this",
                ));
            }
        };
        Ok(Step::Ask(request))
    }

    /// A range of user addresses, or what is wrong with it.
    fn span(&self, start: u64, len: u64, align: u64) -> Result<Span, String> {
        if len == 0 {
            return Err("is empty".into());
        }
        if !start.is_multiple_of(align) || !len.is_multiple_of(align) {
            return Err(format!("{start:#x}+{len:#x} is not a multiple of {align} bytes"));
        }
        match start.checked_add(len) {
            Some(end) if end <= ADDRESS_END_MAX && start >= self.page_bytes => {
                Ok(Span::new(Addr(start), len))
            }
            _ => Err(format!("{start:#x}+{len:#x} is not in the address space of a program")),
        }
    }
}

fn judge_hello(hello: Hello) -> Result<Step, Refused> {
    if hello.version != tiermgr_wire::VERSION {
        return Err(Refused::closing(
            ErrorCode::VersionMismatch,
            format!(
                "the daemon speaks version {} of the protocol and the program version {}; install \
                 the same release of both",
                tiermgr_wire::VERSION,
                hello.version
            ),
        ));
    }
    Ok(match hello.role {
        Role::Client { name, class } => Step::WelcomeClient { name: shorten(name), class },
        Role::ForkedChild { family, lacks_arena } => Step::WelcomeChild { family, lacks_arena },
        Role::Control => Step::WelcomeControl,
    })
}

/// Cut to [`NAME_BYTES_MAX`] at a character, without control characters: names are shown on terminals.
fn shorten(name: String) -> String {
    let mut kept: String =
        name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if kept.len() > NAME_BYTES_MAX {
        let end = (0..=NAME_BYTES_MAX).rev().find(|end| kept.is_char_boundary(*end));
        kept.truncate(end.unwrap_or(0));
    }
    kept
}

const fn advice_of(advice: request::Advice) -> Advice {
    match advice {
        request::Advice::Normal => Advice::Normal,
        request::Advice::WillNeed => Advice::WillNeed,
        request::Advice::Cold => Advice::Cold,
        request::Advice::Sequential => Advice::Sequential,
        request::Advice::Random => Advice::Random,
        request::Advice::Cyclic => Advice::Cyclic,
        request::Advice::ReadMostly => Advice::ReadMostly,
    }
}

/// The default advice for a kind of data, if it differs from none.
#[must_use]
pub const fn advice_for(kind: Kind) -> Option<Advice> {
    match kind {
        Kind::Heap | Kind::Activation | Kind::Kv => None,
        Kind::Weights => Some(Advice::ReadMostly),
    }
}

#[cfg(test)]
mod tests;
