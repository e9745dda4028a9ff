"""Variables that other programs set, with odd values: Tandem works, or refuses in one line that names the variable."""
