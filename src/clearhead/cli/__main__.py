from clearhead.cli import main

raise SystemExit(main())
