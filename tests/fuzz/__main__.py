from fuzz.run import main

main()
