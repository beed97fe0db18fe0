"""Navigation and dashboard around the apps' admin pages."""
