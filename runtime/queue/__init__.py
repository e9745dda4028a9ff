"""One job from plan to MP4 (flow), and the background worker that runs them (worker)."""
