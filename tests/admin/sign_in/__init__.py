"""Sign-in to the console: throttle, sessions, proxies, second factor."""
