from verification.fuzz.run import main

main()
