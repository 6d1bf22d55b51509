use super::*;

const POOL: &str = "[[address-pool]]\nname = 'a'\nranges = ['192.0.2.0/29']\n";

#[test]
fn pools_of_addresses_are_read() {
    let more = "[load-balancers]\nstate-dir = '/srv/lb'\nnft = '/opt/nft'\n[[address-pool]]\nname = 'b'\n\
                ranges = ['198.51.100.1', '2001:db8::/126']\nnetwork = 'lan'\nclusters = ['dev', 'team-*']\npriority = 3\n\
                forward-to = ['10.0.0.0/8']\ninterface = 'eth0'\n[cluster.dev]\nmax-load-balancers = 5\n";
    let settings = check(&[POOL, more]).unwrap();
    let [first, second] = &settings.address_pools[..] else { panic!("{settings:?}") };
    assert_eq!((first.ranges[0].to_string().as_str(), first.ranges[0].len()), ("192.0.2.1-192.0.2.6", 6));
    assert_eq!((first.clusters.as_ref(), first.priority, &first.reserved_ports), (None, 0, &vec![22]));
    assert_eq!((second.network.as_deref(), second.priority), (Some("lan"), 3));
    assert!(second.clusters.as_ref().unwrap()[1].matches("team-7") && second.reserved_ports.is_empty());
    assert_eq!((second.interface.as_deref(), second.forward_to.len()), (Some("eth0"), 1));
    assert_eq!(settings.clusters["dev"].max_load_balancers, Some(5));
    assert_eq!(settings.load_balancers.nft, Path::new("/opt/nft"));
}

#[test]
fn a_pool_that_makes_no_sense_is_refused_with_its_line() {
    let second = |rest: &str| vec![POOL.to_owned(), format!("[[address-pool]]\nname = 'b'\n{rest}\n")];
    let networks =
        |of: &str| vec![format!("[[vm]]\nname = 'a'\nuuid = '{ONE}'\nvsock-cid = 3\nnetworks = {of}\n")];
    for (texts, words) in [
        (second(""), "1.toml:1: [[address-pool]] has no ranges"),
        (
            second("ranges = ['192.0.2.6-192.0.2.9']"),
            "1.toml:3: ranges: 192.0.2.6-192.0.2.9 overlaps the address pool \"a\"",
        ),
        (
            second("ranges = ['10.0.0.1-10.0.0.9', '10.0.0.9']"),
            "1.toml:3: ranges: 10.0.0.9 and 10.0.0.1-10.0.0.9 overlap",
        ),
        (second("ranges = ['10.0.0.9-10.0.0.1']"), "1.toml:3: ranges: 10.0.0.1 comes before 10.0.0.9"),
        (second("ranges = []"), "1.toml:3: ranges must have 1 to 64 entries"),
        (second("ranges = ['10.0.0.1']\nclusters = []"), "1.toml:4: clusters is empty"),
        (
            second("ranges = ['10.0.0.1']\nforward-to = ['10.0.0.1/8']"),
            "1.toml:4: forward-to: \"10.0.0.1/8\" has host bits",
        ),
        (
            second("ranges = ['10.0.0.1']\ninterface = 'eth0'"),
            "1.toml:4: interface has an effect only where the host forwards",
        ),
        (
            second("ranges = ['10.0.0.1']\nforward-to = ['10.0.0.0/8']\ninterface = 'e/0'"),
            "1.toml:5: interface = \"e/0\" cannot be",
        ),
        (second("ranges = ['10.0.0.1']\nname2 = 1"), "1.toml:4: unknown field `name2`"),
        (vec![POOL.to_owned(), POOL.to_owned()], "1.toml:2: address-pool \"a\" is already used at 0.toml:2"),
        (
            networks("{ '52:54:00:12:34' = 'lan' }"),
            "0.toml:5: networks has \"52:54:00:12:34\", which is not a hardware address",
        ),
        (networks("{ '52:54:00:12:34:56' = 'L A N' }"), "0.toml:5: networks: 52:54:00:12:34:56: name"),
    ] {
        let texts: Vec<_> = texts.iter().map(String::as_str).collect();
        let problem = check(&texts).unwrap_err();
        assert!(problem.contains(words), "{problem}\nexpected {words}");
    }
    let problem = check_as(Role::Node, &[POOL]).unwrap_err();
    assert!(problem.contains("0.toml:1: load balancers get their addresses from the pools of"), "{problem}");
}
