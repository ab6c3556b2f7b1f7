from rope_probe.cli import main

main()
