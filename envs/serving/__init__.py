"""An environment in another process or on another machine, used as if it were here."""
