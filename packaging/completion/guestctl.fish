# Completion of guestctl for fish: guestctl itself knows what can come next.
complete --command guestctl --no-files --keep-order \
    --arguments '(command guestctl __complete -- (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor) 2> /dev/null)'
