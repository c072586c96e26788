from gpucr_hpc.agent.daemon import main

main()
