"""Episodes: one attempt at a prompt, from its first token to the end of its environment.

Training runs an episode as a coroutine (`base.RunEpisode`) that returns a Sample:

    single_turn.py       one generation
    environment.py       turns with an environment of an EnvPool, token by token in transcript.py
    pipelines/agents.py  a script of the user that talks to the gateway

`rollick env` runs episodes without a Sample, with a scripted policy in this process:

    in_process.py        run_episode -> EpisodeTrace, run_episodes -> EpisodeReport
    check_env.py         problems of an environment
    recorded.py          the EpisodeRecord of a sample, run again
    pictures.py          an EpisodeTrace as .gif or .png
"""
