"""The terminal table of each analysis: one file per analysis, `render(ds, summary)`."""
