// Reads what creek's own client reads of a table: its changes, schemas and snapshots, as lines of JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/modfin/creek"
)

func show(kind string, value any) {
	line, err := json.Marshal(map[string]any{kind: value})
	if err != nil {
		panic(err)
	}
	fmt.Println(string(line))
}

func main() {
	uri, db, schema, table := os.Args[1], os.Args[2], os.Args[3], os.Args[4]
	count, _ := strconv.Atoi(os.Args[5])
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	client := creek.NewClient(uri, "CREEK", db)
	changes, err := client.StreamWAL(ctx, schema, table)
	if err != nil {
		panic(err)
	}
	var last creek.WAL
	for i := 0; i < count; i++ {
		last, err = changes.Next(ctx)
		if err != nil {
			panic(err)
		}
		show("change", last)
	}
	newest, err := client.GetLastSchema(ctx, schema, table)
	if err != nil {
		panic(err)
	}
	show("last_schema", newest)
	found, err := client.GetSchema(ctx, newest.Fingerprint)
	if err != nil {
		panic(err)
	}
	show("schema", found)
	reader, closer, err := client.Snapshot(ctx, schema, table)
	if err != nil {
		panic(err)
	}
	show("header", reader.Header())
	show("keys", reader.Keys())
	for {
		row, err := reader.Next()
		if err != nil {
			break
		}
		show("row", row)
	}
	closer()
	list, err := client.ListSnapshots(ctx, schema, table)
	if err != nil {
		panic(err)
	}
	show("snapshots", list)
	again, closer2, err := client.GetSnapshot(ctx, list[len(list)-1].Name)
	if err != nil {
		panic(err)
	}
	rows := 0
	for range again.Chan() {
		rows++
	}
	closer2()
	show("rows_again", rows)
	from, err := client.StreamWALFrom(ctx, schema, table, again.Header().At, again.Header().LSN)
	if err != nil {
		panic(err)
	}
	quick, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	after := 0
	for {
		if _, err := from.Next(quick); err != nil {
			break
		}
		after++
	}
	show("after", after)
}
