use super::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("test.toml"))
}

/// The whole chain, as an operator would see it.
fn complaint(text: &str) -> String {
    let error = parse(text).expect_err(text);
    let mut out = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        out = format!("{out}: {cause}");
        source = cause.source();
    }
    out
}

#[test]
fn an_empty_file_is_the_defaults() {
    assert_eq!(parse("").unwrap(), Config::default());
}

#[test]
fn the_printed_defaults_read_back() {
    let text = Config::default().render();
    assert_eq!(parse(&text).unwrap(), Config::default());
    // Every key is there with a comment above it.
    let keys = toml::to_string(&Config::default()).unwrap();
    for key in keys.lines().filter_map(|line| line.split_once(" = ")).map(|(key, _)| key) {
        assert!(text.contains(&format!("\n{key} = ")), "{key} is missing in\n{text}");
    }
}

#[test]
fn the_example_in_dist_is_the_defaults() {
    let shipped = include_str!("../../dist/tiermgrd.toml");
    assert_eq!(shipped, Config::default().render(), "regenerate with tiermgrd --print-config");
}

#[test]
fn unusual_values_read_back() {
    let config = Config {
        socket: "/run/a \"quoted\" \\ path\u{7}".into(),
        socket_group: "gruppe-ä".into(),
        socket_mode: SocketMode(0o7),
        dram: DramLimit::Bytes(Size(DRAM_BYTES_MIN)),
        limbo: Size(LIMBO_BYTES_MAX),
        log_level: LogLevel::Trace,
        assume_missing: vec!["uffd_move".into(), "uffd_poison".into()],
        store: StoreSettings { path: "/dev/nvme0n1".into(), size: StoreSize::All, create: false },
        ..Config::default()
    };
    assert_eq!(parse(&config.render()).unwrap(), config);
}

#[test]
fn unknown_keys_are_errors_that_name_the_key() {
    assert!(complaint("sockett = \"/a\"").contains("sockett"));
    assert!(complaint("[store]\nsizes = \"1G\"").contains("sizes"));
    assert!(complaint("[cache]\n").contains("cache"));
}

#[test]
fn values_of_the_wrong_kind_say_what_would_be_right() {
    assert!(complaint("dram = \"half\"").contains("a size or a share"));
    assert!(complaint("dram = \"0%\"").contains("1% to 95%"));
    assert!(complaint("dram = \"96%\"").contains("1% to 95%"));
    assert!(complaint("limbo = \"8Mibi\"").contains("not a unit"));
    assert!(complaint("limbo = -1").contains("negative"));
    assert!(complaint("socket_mode = \"rw\"").contains("octal"));
    assert!(complaint("socket_mode = \"1777\"").contains("octal"));
    assert!(complaint("log_level = \"loud\"").contains("one of error"));
    assert!(complaint("[store]\nsize = \"some\"").contains("\"all\""));
}

#[test]
fn limits_hold_at_the_edge_and_not_beyond() {
    assert!(parse("dram = \"32MiB\"").is_ok());
    assert!(complaint("dram = \"31MiB\"").contains("`dram`"));
    assert!(parse("limbo = \"8MiB\"").is_ok());
    assert!(complaint("limbo = \"6MiB\"").contains("`limbo`"));
    assert!(parse("limbo = \"1GiB\"").is_ok());
    assert!(complaint("limbo = \"1026MiB\"").contains("`limbo`"));
    assert!(complaint("limbo = \"9MiB\"").contains("multiple of 2MiB"));
    assert!(parse("[store]\nsize = \"16MiB\"").is_ok());
    assert!(complaint("[store]\nsize = \"15MiB\"").contains("`store.size`"));
    assert!(complaint("connections_per_uid = 0").contains("connections_per_uid"));
    assert!(complaint("assume_missing = [\"move\"]").contains("uffd_move"));
    assert!(complaint("socket = \"relative\"").contains("absolute"));
}

#[test]
fn a_named_file_that_is_missing_is_an_error() {
    let path = Path::new("/nonexistent/tiermgrd.toml");
    assert!(matches!(Config::load(Some(path)), Err(ConfigError::Read { .. })));
}
