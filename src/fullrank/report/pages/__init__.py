"""One module a page, or a part of one."""
